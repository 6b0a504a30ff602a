"""The SFT-initialised tiny model that comes with the repository, in bfloat16, so that the example need not make it first.

    python -m recipe.tiny.shipped

makes it anew and writes it into this package: the warm-up with seed 0, its weights rounded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.model import build_model, build_tokenizer
from recipe.tiny.sampling import judge
from recipe.tiny.task import problems
from recipe.tiny.warm_up import WarmUpSettings, warm_up

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


def make(folder: Path = FOLDER) -> None:
    """Warm a freshly initialised model up and write its weights with the record of how they were made."""
    settings, tokenizer = WarmUpSettings(), build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    held_out = problems("validation", HELD_OUT, seed=settings.seed)
    result = warm_up(model, tokenizer, problems("train", TRAIN, seed=settings.seed), held_out, settings)
    model.to(torch.bfloat16).save_pretrained(folder)
    rounded = model.float().eval()
    record = {
        "command": "python -m recipe.tiny.shipped",
        "settings": asdict(settings),
        "train_size": TRAIN,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "warm_up": result,
        "rounded": {
            "greedy_accuracy": judge(rounded, tokenizer, held_out, temperature=0.0)["right"],
            "sampled_accuracy": judge(rounded, tokenizer, held_out, seed=settings.seed)["right"],
        },
        "sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
