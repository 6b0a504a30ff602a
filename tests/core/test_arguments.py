"""What compute_token_weights takes and refuses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import grail_advantage
from grail_advantage import AnswerSpan, GrailConfig, TokenWeights, compute_token_weights
from tests.core.tiny_models import ROLLOUTS, Batch, Rollout, char_tokenizer, make_batch, tiny_model

MODEL = cache(tiny_model)


def changed(**tensors: torch.Tensor) -> Batch:
    return dataclasses.replace(make_batch([ROLLOUTS["right"], ROLLOUTS["empty box"]], "left"), **tensors)


def flipped(mask: str, place: int) -> Batch:
    """With a hole in the second row's mask."""
    batch = changed()
    getattr(batch, mask)[1, place] = 0
    return batch


def as_list(name: str) -> Batch:
    return dataclasses.replace(changed(), **{name: getattr(changed(), name).tolist()})


def one_above_0() -> torch.Tensor:
    """Log-probabilities of which one is no such thing, and one that nobody reads."""
    values_BL = torch.full(changed().input_ids.shape, -0.5)
    values_BL[0, 0], values_BL[1, -1] = 9.0, 0.5
    return values_BL


REFUSED: list[tuple[Callable[[], Batch], dict[str, Any], list[str]]] = [
    (lambda: changed(input_ids=torch.zeros(5, dtype=torch.long)), {}, ["input_ids", "(B, L)", "(5,)"]),
    (lambda: changed(attention_mask=torch.ones(2, 7)), {}, ["attention_mask", "(2, 7)", "input_ids", "must agree"]),
    (lambda: changed(response_mask=torch.ones(1, 3)), {}, ["response_mask", "(1, 3)", "input_ids", "must agree"]),
    (lambda: changed(advantages=torch.zeros(3)), {}, ["advantages", "one number a row", "(2,)", "(3,)"]),
    (changed, {"temperature": 0.0}, ["temperature=0.0", "greater than 0"]),
    (lambda: flipped("attention_mask", -1), {}, ["response_mask", "padding", "attention_mask"]),
    (lambda: flipped("response_mask", -3), {}, ["response_mask", "row 1", "gaps", "contiguous"]),
    (
        lambda: make_batch([ROLLOUTS["right"], Rollout("", "a", -1.0)]),
        {},
        ["row 1", "no prompt token", "add at least one"],
    ),
    (lambda: as_list("input_ids"), {}, ["input_ids must be a tensor, got list; use torch.tensor"]),
    (changed, {"old_log_probs": [0.0]}, ["old_log_probs must be a tensor, got list"]),
    (changed, {"groups": torch.zeros(2)}, ["groups must hold whole numbers", "torch.float32", "torch.int64"]),
    (changed, {"groups": torch.tensor([3, -2])}, ["groups", "-2", "at least 0", "torch.unique"]),
    (changed, {"entropy": torch.zeros(2, 3)}, ["entropy", "(2, 3)", "input_ids", "must agree"]),
    (changed, {"old_log_probs": one_above_0()}, ["old_log_probs holds 0.5", "at most 0"]),
    (changed, {"examples": []}, ["examples", "one a row", "2", "0"]),
    (changed, {"masked": torch.zeros(3)}, ["masked", "one number a row", "(2,)", "(3,)"]),
    (changed, {"step": -1}, ["step=-1", "at least 0"]),
    (changed, {"config": "grail"}, ["config='grail'", "GrailConfig()", "grail_advantage.methods.method"]),
]


def test_refusals_name_the_argument_and_the_fix() -> None:
    for batch, options, words in REFUSED:
        arguments = {"config": GrailConfig(), **options}
        with pytest.raises(ValueError) as raised:
            compute_token_weights(MODEL(), char_tokenizer(), *batch().tensors(), **arguments)
        for word in words:
            assert word in str(raised.value)


def test_batches_without_any_response_or_row() -> None:
    model = MODEL()
    got = compute_token_weights(
        model, char_tokenizer(), *make_batch([ROLLOUTS["no response"]] * 2).tensors(), GrailConfig()
    )
    assert got.weights.tolist() == [[0.0] * 13] * 2
    assert got.scores.isnan().all()
    assert got.spans == [None, None]
    assert got.stats == {}
    none = torch.zeros(0, 5, dtype=torch.long)
    got = compute_token_weights(model, char_tokenizer(), none, none, none, torch.zeros(0), GrailConfig())
    assert got.weights.shape == got.scores.shape == (0, 5)
    assert (got.spans, got.stats) == ([], {})


def test_public_signatures() -> None:
    parameters = inspect.signature(compute_token_weights).parameters
    positional = ["model", "tokenizer", "input_ids", "attention_mask", "response_mask", "advantages", "config"]
    by_name = [
        *(
            "temperature",
            "old_log_probs",
            "entropy",
            "groups",
            "examples",
            "masked",
            "fields",
            "process_group",
            "step",
            "aggregate",
            "answer",
        )
    ]
    assert list(parameters) == [*positional, *by_name]
    assert all(parameters[name].default is inspect.Parameter.empty for name in positional)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in by_name)
    assert all(parameters[name].default is not inspect.Parameter.empty for name in by_name)
    assert parameters["temperature"].default == 1.0
    result = ["weights", "scores", "spans", "stats", "advantages", "rows", "non_finite"]
    assert [field.name for field in dataclasses.fields(TokenWeights)] == result
    assert [field.name for field in dataclasses.fields(AnswerSpan)] == ["start", "content_start", "content_end", "end"]
    of_span = inspect.signature(grail_advantage.find_answer_span).parameters
    assert list(of_span) == ["token_ids", "tokenizer", "which", "answer"] and of_span["which"].default == "last"
    for name in ("AnswerSpan", "GrailConfig", "TokenWeights", "compute_token_weights", "find_answer_span"):
        assert name in grail_advantage.__all__
