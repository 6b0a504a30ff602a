"""The study's runs: each in a process of its own, on one thread, and one file when it is finished."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipe.tiny.model import build_model
from recipe.tiny.task import problems
from recipe.tiny.warm_up import WarmUpSettings, warm_up
from study import task
from study.arms import Arm
from study.trainer import RunSettings, train

RAW = "raw"
WARM_UP = "warm_up"
MODELS = "models"
PACKAGES = ("torch", "transformers", "verl", "numpy")


@dataclass(frozen=True)
class StudySettings:
    """Settings of the whole study."""

    run: RunSettings = field(default_factory=RunSettings)
    warm_up: WarmUpSettings = field(
        default_factory=lambda: WarmUpSettings(
            error_rate=0.2, steps=1000, evaluate_every=250, greedy_target=1.1, max_seconds=3600.0
        )
    )
    train_size: int = 4096
    held_out_size: int = 256


def prepare_model(folder: Path, settings: StudySettings) -> None:
    """The warmed-up model that every run starts from; made once."""
    stamp = folder / "warm_up.json"
    wanted = json.loads(json.dumps({"settings": asdict(settings.warm_up), "train_size": settings.train_size}))
    if stamp.is_file() and wanted.items() <= json.loads(stamp.read_text()).items():
        print(f"reused {folder}", flush=True)
        return
    stamp.unlink(missing_ok=True)
    torch.set_num_threads(1)  # so that the result does not depend on the number of cores
    tokenizer = task.study_tokenizer()
    model = build_model(tokenizer, settings.warm_up.seed)
    result = warm_up(
        model,
        tokenizer,
        problems("train", settings.train_size),
        problems("validation", settings.held_out_size),
        settings.warm_up,
        report=lambda line: print(line, flush=True),
        solve=task.solve,
        max_new_tokens=task.MAX_RESPONSE_TOKENS,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stamp.write_text(json.dumps({**wanted, "result": result}, indent=2) + "\n")


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run_one(output_dir: Path, arm: Arm, seed: int, settings: StudySettings) -> None:
    """One run in this process; writes its file when it is finished."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    model = load_model(output_dir / WARM_UP)
    figures = train(
        model,
        task.study_tokenizer(),
        problems("train", settings.train_size),
        problems("validation", settings.held_out_size),
        arm,
        settings.run,
        seed,
        report=lambda line: print(f"  {line}", flush=True),
    )
    if seed == 0:
        model.save_pretrained(output_dir / MODELS / arm.name)
    record = {
        "arm": arm.name,
        "label": arm.label,
        "group": arm.group,
        "seed": seed,
        "settings": _run_settings(arm, settings),
        "versions": {name: version(name) for name in PACKAGES},
        "seconds": time.perf_counter() - started,
        **figures,
    }
    path = _raw_path(output_dir, arm, seed)
    path.with_suffix(".tmp").write_text(json.dumps(record) + "\n")
    path.with_suffix(".tmp").rename(path)


def is_done(output_dir: Path, arm: Arm, seed: int, settings: StudySettings) -> bool:
    """Whether a run with these settings has ended."""
    path = _raw_path(output_dir, arm, seed)
    return path.is_file() and json.loads(path.read_text())["settings"] == _run_settings(arm, settings)


def _raw_path(output_dir: Path, arm: Arm, seed: int) -> Path:
    return output_dir / RAW / f"{arm.name}-seed{seed}.json"


def _run_settings(arm: Arm, settings: StudySettings) -> dict[str, Any]:
    described = asdict(arm)
    for name in ("label", "group", "seeds"):
        del described[name]
    described["method"] = type(arm.weights).__name__ if arm.weights else None
    return json.loads(json.dumps({"arm": described, **asdict(settings)}))


def run_all(output_dir: Path, arms: list[Arm], seeds: list[int], settings: StudySettings, processes: int) -> None:
    """All runs that are missing, a seed at a time, so that what is finished early is already a comparison."""
    wanted = [(arm, seed) for seed in seeds for arm in arms if seed < arm.seeds]
    missing = [(arm, seed) for arm, seed in wanted if not is_done(output_dir, arm, seed, settings)]
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them finished; {processes} at a time", flush=True)
    (output_dir / RAW).mkdir(parents=True, exist_ok=True)
    durations: list[float] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {pool.submit(run_one, output_dir, arm, seed, settings): (arm, seed) for arm, seed in missing}
        try:
            for finished in as_completed(runs):
                arm, seed = runs[finished]
                finished.result()
                durations.append(json.loads(_raw_path(output_dir, arm, seed).read_text())["seconds"])
                left = len(missing) - len(durations)
                minutes = statistics.fmean(durations) * left / processes / 60
                print(
                    f"{len(durations)}/{len(missing)}: {arm.name} seed {seed} in {durations[-1]:.0f} s; "
                    f"about {minutes:.0f} min left",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
