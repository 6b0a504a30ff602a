"""The SFT-initialised tiny model that comes with this package, in bfloat16, so that the example need not make it first.

    python -m verl_cpu.tiny.shipped

makes it anew and writes it into this package: the warm-up with seed 0, its weights rounded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.sampling import judge
from verl_cpu.tiny.task import problems
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

FOLDER = Path(__file__).parent / "warmed_up"
WEIGHTS = "model.safetensors"
RECORD = "record.json"
TRAIN, HELD_OUT = 4096, 256


def load_shipped() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in float32, whose weights are bfloat16 numbers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), build_tokenizer()


def weights_digest(folder: Path = FOLDER) -> str:
    """SHA-256 of a folder's file of weights."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def ship(
    model: PreTrainedModel,
    folder: Path,
    module: str,
    settings: Any,
    measured: Callable[[PreTrainedModel], dict[str, Any]],
    **trained: Any,
) -> None:
    """Write a model's weights, rounded to bfloat16, with the record of how they were made: the module that makes them, its
    settings, how it trained, and what is measured of the rounded model."""
    model.to(torch.bfloat16).save_pretrained(folder)
    record = {
        "command": f"python -m {module}",
        "settings": asdict(settings),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **trained,
        **measured(model.float().eval()),
        "sha256": weights_digest(folder),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def make(folder: Path = FOLDER) -> None:
    """Warm a freshly initialised model up, and write its weights."""
    settings, tokenizer = WarmUpSettings(), build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    held_out = problems("validation", HELD_OUT, seed=settings.seed)
    result = warm_up(model, tokenizer, problems("train", TRAIN, seed=settings.seed), held_out, settings)

    def measured(rounded: PreTrainedModel) -> dict[str, Any]:
        greedy = judge(rounded, tokenizer, held_out, temperature=0.0)["right"]
        sampled = judge(rounded, tokenizer, held_out, seed=settings.seed)["right"]
        return {"rounded": {"greedy_accuracy": greedy, "sampled_accuracy": sampled}}

    ship(model, folder, "verl_cpu.tiny.shipped", settings, measured, train_size=TRAIN, warm_up=result)


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
