"""The warmed-up model of the example is the one that its record describes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from recipe.tiny import shipped
from recipe.tiny.model import build_model
from recipe.tiny.prepare import MODEL_FOLDER, default_settings, prepare
from recipe.tiny.warm_up import WarmUpSettings

RECORD = json.loads((shipped.FOLDER / shipped.RECORD).read_text())


def test_the_record_is_that_of_todays_warm_up_and_of_these_weights() -> None:
    assert RECORD["settings"] == asdict(WarmUpSettings())
    assert RECORD["sha256"] == shipped.weights_digest()
    model, tokenizer = shipped.load_shipped()
    fresh = build_model(tokenizer, seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float())


def test_the_example_begins_with_it_whatever_the_seed(tmp_path: Path) -> None:
    problems = []
    kept, _ = shipped.load_shipped()
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        assert prepare(folder, replace(default_settings("tiny", seed), train_size=8, validation_size=4))
        made = AutoModelForCausalLM.from_pretrained(folder / MODEL_FOLDER)
        assert made.dtype == torch.float32
        for name, value in made.state_dict().items():
            assert torch.equal(value, kept.state_dict()[name])
        problems.append((folder / "train.parquet").read_bytes())
    assert problems[0] != problems[1]
