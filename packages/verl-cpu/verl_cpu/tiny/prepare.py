"""Make the input of a small training run: model, tokenizer, ``train.parquet`` and ``validation.parquet``.

    python -m verl_cpu.tiny.prepare --output-dir DIR --seed 0
    python -m verl_cpu.tiny.prepare --output-dir DIR --seed 0 --warm-up

The first takes the SFT-initialised model that comes with this package, the second trains a new one. A second call with the
same settings and the same code finds ``DIR/warm_up.json`` and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.agent_warm_up import FOLDER as AGENT_FOLDER
from verl_cpu.tiny.agent_warm_up import load_agent
from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.shipped import FOLDER, load_shipped, weights_digest
from verl_cpu.tiny.smollm2 import load_smollm2
from verl_cpu.tiny.task import Problem, Split, problems
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

DATA_SOURCE = "tiny_chain_sum"
MODEL_FOLDER = "model"
STAMP = "warm_up.json"
SHIPPED = {"tiny": (FOLDER, load_shipped), "agent": (AGENT_FOLDER, load_agent)}
"""Where the models are that come with this package, and how they are loaded."""


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of a folder; one that was made with equal settings is used again."""

    base_model: Literal["tiny", "smollm2", "agent"] = "tiny"
    """A model of 0.65 M parameters, SmolLM2-135M-Instruct, or the first with a tool (:mod:`verl_cpu.tiny.agent`)."""
    seed: int = 0
    """Seed of the problems, and of the initial model where there is a warm-up."""
    train_size: int = 4096
    validation_size: int = 256
    warm_up: WarmUpSettings | None = field(default_factory=WarmUpSettings)
    """None: the SFT-initialised model that comes with this package."""


def prepare(output_dir: Path, settings: PrepareSettings, report: Callable[[str], None] = print) -> bool:
    """Fill ``output_dir``; returns False when an earlier call with the same settings and code had already done so."""
    stamp_path = output_dir / STAMP
    files = [output_dir / "train.parquet", output_dir / "validation.parquet", output_dir / MODEL_FOLDER / "config.json"]
    wanted = {"settings": asdict(settings), "code": _code_hash()}
    if settings.warm_up is None:
        wanted["weights"] = weights_digest(SHIPPED[settings.base_model][0])
    if stamp_path.is_file() and all(path.is_file() for path in files):
        stamp = json.loads(stamp_path.read_text())
        if {key: stamp.get(key) for key in wanted} == wanted:
            report(f"reused {output_dir}: settings and code are unchanged")
            return False

    output_dir.mkdir(parents=True, exist_ok=True)
    stamp_path.unlink(missing_ok=True)  # written last, so that an interrupted call is not taken for a finished one
    report("making problems")
    train = problems("train", settings.train_size, seed=settings.seed)
    validation = problems("validation", settings.validation_size, seed=settings.seed)
    _write_parquet(output_dir / "train.parquet", "train", train)
    _write_parquet(output_dir / "validation.parquet", "validation", validation)

    if settings.warm_up is None:
        _, load = SHIPPED[settings.base_model]
        model, tokenizer = load()
        result = {}
    else:
        model, tokenizer = _base_model(settings)
        result = warm_up(model, tokenizer, train, validation, settings.warm_up, report=report)
    model.save_pretrained(output_dir / MODEL_FOLDER)
    tokenizer.save_pretrained(output_dir / MODEL_FOLDER)
    stamp_path.write_text(json.dumps({**wanted, "result": result}, indent=2) + "\n")
    report(f"wrote {output_dir}")
    return True


def default_settings(base_model: str, seed: int, *, anew: bool = False) -> PrepareSettings:
    """Settings of a model with a third of its samples correct; ``anew``: the tiny model is SFT-initialised anew, too."""
    if base_model == "smollm2":
        # It can write and add already, so it needs the form of the solutions more than the sums.
        form = WarmUpSettings(batch_size=8, learning_rate=3e-4, steps=64, evaluate_every=16, seed=seed)
        return PrepareSettings(base_model="smollm2", seed=seed, validation_size=48, warm_up=form)
    if base_model == "agent":
        if anew:
            raise ValueError(
                "--warm-up (WARM_UP=1 of the launch script) is for the tiny model without a tool; leave it out, or make the "
                "agent's model anew with python -m verl_cpu.tiny.agent_warm_up"
            )
        return PrepareSettings(base_model="agent", seed=seed, validation_size=128, warm_up=None)
    return PrepareSettings(seed=seed, warm_up=WarmUpSettings(seed=seed) if anew else None)


def _base_model(settings: PrepareSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    if settings.base_model == "smollm2":
        return load_smollm2()
    tokenizer = build_tokenizer()
    return build_model(tokenizer, settings.seed), tokenizer


def _write_parquet(path: Path, split: Split, rows: list[Problem]) -> None:
    """One row a problem in verl's schema for its RLHF data set."""
    table = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index, "problem": problem.text},
        }
        for index, problem in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def _code_hash() -> str:
    """Hash of this package's sources: a changed task or model makes an old folder stale."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a tiny SFT-initialised model and its arithmetic data.")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, initial model and SFT")
    parser.add_argument("--base-model", choices=("tiny", "smollm2", "agent"), default="tiny", help="the model to train")
    anew = "make the tiny model anew by SFT instead of taking the one here"
    parser.add_argument("--warm-up", action="store_true", help=anew)
    options = parser.parse_args(arguments)
    settings = default_settings(options.base_model, options.seed, anew=options.warm_up)
    prepare(options.output_dir, settings, report=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
