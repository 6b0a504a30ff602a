"""Measures methods task by task, a few processes at a time. A finished method is a file at once, and the next run resumes.

Shape suffixes: B responses, L prompt + response.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench import agreement, gsm8k, places
from bench.methods import NeedsMoreError, credit, method_specs, signal_of, source_digest
from bench.policy import SampledBatch, initial_model, roll_out
from bench.statistics import Estimate
from bench.task import TASKS, task_problems, task_tokenizer
from grail_advantage.dump.whole_file import write_whole
from grail_advantage.token_weights import response_statistics
from recipe.hashing import digest

COLUMNS = (
    "task", "seed", "method", "figure", "value", "error", "count", "note", "settings", "source", "versions", "date",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "numpy")
SETTING = "all"
"""In place of a method: figures of the task's own, as its yardstick's ceiling."""
GSM8K = "gsm8k"
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    sft_steps: int = 1000
    """Steps of the models' supervised fine-tuning."""
    problems: int = 128
    """Problems of the update, eight responses each."""
    yardstick: int = 2048
    """Other problems, of the yardstick."""
    update_shuffles: int = 5
    """Shuffled controls whose updates are computed; all other figures have 20."""
    edits: int = 48
    """Solutions of GSM8K."""


QUICK = Settings(sft_steps=400, problems=48, yardstick=1024, update_shuffles=1, edits=24)


@dataclass(frozen=True)
class Job:
    """The methods on one task and seed."""

    task: str
    seed: int
    specs: tuple[str, ...]
    settings: Settings
    folder: Path
    gsm8k: Path | None = None

    @cached_property
    def solutions(self) -> list[str]:
        """GSM8K's file by its digest, so that another file is measured anew."""
        return [] if self.gsm8k is None else [digest(self.gsm8k.read_text(encoding="utf-8"))]

    def file(self, spec: str) -> Path:
        """Where a method's rows are."""
        source = "" if spec == SETTING else source_digest(spec)
        own = [spec, asdict(self.settings), source, measures_digest(), *self.solutions]
        return self.folder / "rows" / f"{self.task}-{self.seed}-{digest(own)}.csv"

    @property
    def missing(self) -> list[str]:
        """Methods whose rows are not there."""
        return [spec for spec in (SETTING, *self.specs) if not self.file(spec).exists()]


@cache
def measures_digest() -> str:
    """Of the bench's files that make figures, so that no figure of an earlier version is taken for one of this."""
    names = ("agreement", "exact", "gsm8k", "methods", "places", "policy", "statistics", "task")
    return digest([Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in names])


def run(
    names: Sequence[str], folder: Path, settings: Settings, *, seeds: int, processes: int, gsm8k: Path | None = None
) -> list[Row]:
    """Measure what is missing and return all rows of these methods (all registered ones if empty) and settings, in ``folder``;
    ``seeds`` models of each task, ``processes`` tasks at a time. ValueError for an unknown method or option."""
    specs = tuple(method_specs(names))
    jobs = [Job(task, seed, specs, settings, folder) for seed in range(1, seeds + 1) for task in TASKS]
    if gsm8k is not None:
        jobs.append(Job(GSM8K, 0, specs, settings, folder, gsm8k))
    missing = [job for job in jobs if job.missing]
    if processes == 1:
        list(map(do, missing))
    elif missing:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(do, missing))
    return [row for job in jobs for spec in (SETTING, *specs) for row in read_rows(job.file(spec))]


def do(job: Job) -> None:
    """All of a job that is missing, in this process."""
    torch.set_num_threads(1)
    heading = f"{job.task}, seed {job.seed}:"
    print(f"{heading} {len(job.missing)} to measure; first the model and its responses", flush=True)
    if job.gsm8k is not None:
        model, tokenizer, batch, count = gsm8k.prepare(job.gsm8k, job.settings.edits)
        yardstick, own = None, {"solutions": Estimate(count, math.nan, count)}
    else:
        model, tokenizer, batch, yardstick, own = prepare(job)
    _keep(job, SETTING, own)
    started = time.process_time()
    response_statistics(model, tokenizer, batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL)
    forward = time.process_time() - started
    seconds: list[float] = []
    missing = job.missing
    for number, spec in enumerate(missing, 1):
        started = time.monotonic()
        try:
            _keep(job, spec, measure(model, tokenizer, batch, yardstick, spec, job, forward))
            note = ""
        except NeedsMoreError as reason:
            _keep(job, spec, {}, note=str(reason))
            note = f" ({reason})"
        seconds.append(time.monotonic() - started)
        left = fmean(seconds) * (len(missing) - number) / 60
        print(
            f"{heading} {spec}{note}, {seconds[-1]:.0f} s; {number} of {len(missing)}, about {left:.0f} min left",
            flush=True,
        )


def prepare(job: Job) -> tuple[Any, ...]:
    """A task's model, its tokenizer and responses, the yardstick, and figures of these."""
    tokenizer, settings = task_tokenizer(), job.settings
    model = initial_model(job.task, job.seed, settings.sft_steps, job.folder / "models")
    problems = task_problems(job.task, "train", settings.problems + settings.yardstick, job.seed)
    of_update, others = problems[: settings.problems], problems[settings.problems :]
    batch = roll_out(model, tokenizer, of_update, job.seed, 1)
    yardstick = agreement.Yardstick.of(model, tokenizer, of_update, others, job.seed)
    mixed = int((batch.advantages_B != 0).view(len(of_update), -1).any(dim=1).sum())
    labelled = sum(label is not None for label in batch.labels)
    figures = {
        "ceiling": yardstick.ceiling,
        "halves": Estimate(yardstick.halves, math.nan, len(others)),
        "accuracy": Estimate(float(batch.rewards_B.mean()), math.nan, len(of_update)),
        "mixed groups": Estimate(mixed, math.nan, len(of_update)),
        "known first errors": Estimate(labelled, math.nan, len(of_update)),
    }
    return model, tokenizer, batch, yardstick, figures


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: SampledBatch,
    yardstick: agreement.Yardstick | None,
    spec: str,
    job: Job,
    forward: float,
) -> dict[str, Estimate]:
    """All figures of a method, ``forward`` being the seconds of a plain forward over the batch; NeedsMoreError where it needs
    what the batch does not have."""
    positions = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], keywords: dict[str, Any]) -> None:
        nonlocal positions
        hidden_BLD = inputs[0] if inputs else keywords["hidden_states"]
        positions += hidden_BLD.shape[0] * hidden_BLD.shape[1]

    first_layer = next(module for module in model.modules() if type(module).__name__.endswith("DecoderLayer"))
    hook = first_layer.register_forward_pre_hook(count, with_kwargs=True)
    try:
        started = time.process_time()
        advantages_BL = credit(model, tokenizer, batch, signal_of(spec))
        taken = time.process_time() - started
    finally:
        hook.remove()
    figures = {
        "passes": Estimate(positions / int(batch.attention_mask_BL.sum()), math.nan, 1),
        "seconds": Estimate(taken, math.nan, 1),
        "forwards": Estimate(taken / forward, math.nan, 1),
    }
    figures |= places.measure(batch, advantages_BL, job.seed)
    if yardstick is not None:
        shuffles = job.settings.update_shuffles
        figures |= agreement.measure(model, batch, advantages_BL, yardstick, job.seed, update_shuffles=shuffles)
    return figures


def _keep(job: Job, spec: str, figures: dict[str, Estimate], note: str = "") -> None:
    common = {
        "task": job.task,
        "seed": job.seed,
        "method": spec,
        "settings": digest(asdict(job.settings)),
        "source": "" if spec == SETTING else source_digest(spec),
        "versions": " ".join(f"{name} {version(name)}" for name in PACKAGES),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    rows = [
        {**common, "figure": name, "value": one.value, "error": one.error, "count": one.count, "note": note}
        for name, one in figures.items()
    ]
    rows = rows or [{**common, "figure": "", "value": "", "error": "", "count": "", "note": note}]
    write_rows(job.file(spec), rows, COLUMNS)


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """A CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
