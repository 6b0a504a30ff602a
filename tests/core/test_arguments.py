"""What compute_token_weights refuses, and batches without anything to weigh."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from grail_advantage import GrailConfig, compute_token_weights
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, make_batch, tiny_model

MODEL = cache(lambda: tiny_model(layers=1))
GOOD = vars(make_batch([ROLLOUTS["right"], ROLLOUTS["empty box"]])) | {"config": GrailConfig()}


def with_values(name: str, *changes: tuple[int, int, float]) -> dict[str, torch.Tensor]:
    """The good argument, or log-probabilities of -0.5, with some values changed."""
    values_BL = GOOD.get(name, torch.full(GOOD["input_ids"].shape, -0.5)).clone()
    for row, place, value in changes:
        values_BL[row, place] = value
    return {name: values_BL}


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"input_ids": torch.zeros(5, dtype=torch.long)}, ["input_ids", "(B, L)", "(5,)"]),
    ({"input_ids": GOOD["input_ids"].tolist()}, ["input_ids must be a tensor, got list; use torch.tensor"]),
    ({"attention_mask": torch.ones(2, 7)}, ["attention_mask", "(2, 7)", "input_ids", "must agree"]),
    ({"response_mask": torch.ones(1, 3)}, ["response_mask", "(1, 3)", "input_ids", "must agree"]),
    ({"advantages": torch.zeros(3)}, ["advantages", "one number a response", "(2,)", "(3,)"]),
    ({"temperature": 0.0}, ["temperature=0.0", "greater than 0"]),
    ({"tokens": 0}, ["tokens=0", "at least 1", "alone"]),
    (with_values("attention_mask", (1, -1, 0)), ["response_mask", "padding", "attention_mask"]),
    (
        vars(make_batch([ROLLOUTS["right"], Rollout("", "a", -1.0)])),
        ["response 1", "no prompt token", "add at least one"],
    ),
    ({"old_log_probs": [0.0]}, ["old_log_probs must be a tensor, got list"]),
    # One is above 0, and one that nobody reads.
    (with_values("old_log_probs", (0, 0, 9.0), (1, -1, 0.5)), ["old_log_probs holds 0.5", "at most 0"]),
    ({"groups": torch.zeros(2)}, ["groups must hold whole numbers", "torch.float32", "torch.int64"]),
    ({"groups": torch.tensor([3, -2])}, ["groups", "-2", "at least 0", "torch.unique"]),
    ({"entropy": torch.zeros(2, 3)}, ["entropy", "(2, 3)", "input_ids", "must agree"]),
    ({"examples": []}, ["examples", "one a response", "2", "0"]),
    ({"masked": torch.zeros(3)}, ["masked", "one number a response", "(2,)", "(3,)"]),
    ({"rewards": torch.zeros(3)}, ["rewards", "one number a response", "(2,)", "(3,)"]),
    ({"rewards": torch.zeros(2, dtype=torch.int64)}, ["rewards_B must be floats", "torch.int64"]),
    ({"step": -1}, ["step=-1", "at least 0"]),
    ({"config": "grail"}, ["config='grail'", "GrailConfig()", "grail_advantage.methods.method"]),
]


def test_refusals_name_the_argument_and_the_fix() -> None:
    for change, words in REFUSED:
        with pytest.raises(ValueError) as raised:
            compute_token_weights(MODEL(), char_tokenizer(), **GOOD | change)
        for word in words:
            assert word in str(raised.value)


def test_batches_without_any_response_or_row() -> None:
    batch = make_batch([ROLLOUTS["no response"]] * 2)
    got = compute_token_weights(MODEL(), char_tokenizer(), *batch.tensors(), GrailConfig())
    assert got.weights.tolist() == [[0.0] * 13] * 2
    assert got.scores.isnan().all()
    assert got.spans == [None, None]
    assert got.stats == {}
    none = torch.zeros(0, 5, dtype=torch.long)
    got = compute_token_weights(MODEL(), char_tokenizer(), none, none, none, torch.zeros(0), GrailConfig())
    assert got.weights.shape == got.scores.shape == (0, 5)
    assert (got.spans, got.stats) == ([], {})
