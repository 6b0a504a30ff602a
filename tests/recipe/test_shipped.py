"""The warmed-up model of the example is the one that its record describes."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from recipe.tiny import shipped
from recipe.tiny.model import build_model
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
