"""OAR-G and OAR-P against the plain computation of `oar_reference.py`, and what they promise besides the numbers."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedTokenizerFast

from grail_advantage import Oar, TokenWeights, compute_token_weights
from tests.core.common import few, watch_inputs
from tests.core.oar_reference import PlainOar, oar_weights
from tests.core.tiny_models import (
    PAD_ID,
    ROLLOUTS,
    Rollout,
    char_tokenizer,
    encode,
    id_to_character,
    make_batch,
    tiny_model,
)

METHODS = ("gradient", "perturbation")
VARIANTS = ("official", "grail_port")
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
"""The first block sees everything, the others the last six positions: a cache that cannot be shared."""


@cache
def subject(family: str = "qwen3", windowed: bool = False) -> tuple[Any, PlainOar]:
    """A float64 model that no test may change, and its reference with what was computed so far."""
    model = tiny_model(family, layers=2, **(WINDOW if windowed else {})).double()
    return model, PlainOar(model, PAD_ID)


def assert_matches(
    model: nn.Module, plain: PlainOar, rollouts: list[Rollout], method: str, padding: str = "both", **options: Any
) -> TokenWeights:
    """Weights, and in the responses that need them scores, are those of the plain computation.

    RMSNorm and RoPE compute in float32 in any model; of its seven digits the noise leaves the gradient three.
    """
    tolerance = {"gradient": 1e-3, "perturbation": 1e-5}[method]
    config, batch = Oar(method, **options), make_batch(rollouts, padding)
    got = compute_token_weights(model, char_tokenizer(), *batch.tensors(), config)
    rows = [(encode(rollout.prompt), encode(rollout.response), rollout.advantage) for rollout in rollouts]
    expected = oar_weights(plain, method, rows, id_to_character(), options)
    values = batch.of_responses(got.weights), batch.of_responses(got.scores), got.spans, batch.advantages.tolist()
    for weights, scores, span, advantage, (plain_weights, plain_scores) in zip(*values, expected, strict=True):
        assert weights == pytest.approx(plain_weights, rel=20 * tolerance, abs=20 * tolerance)
        if span is None or advantage == 0 or (config.statistics == "reasoning" and span.start == 0):
            assert all(map(math.isnan, scores))
        else:
            largest = max(abs(score) for score in plain_scores if not math.isnan(score))
            assert scores == pytest.approx(plain_scores, rel=tolerance, abs=tolerance * largest, nan_ok=True)
    assert (got.weights[batch.response_mask == 0] == 0).all()
    return got


OPTIONS = {
    "variant": VARIANTS,
    "probe": ("answer_mean", "last", "answer_joint"),
    "normalize_mass": (True, False),
    "noise_std": (1e-3, 0.02),
    "noise_seed": (0, 7),
    "max_perturbations": (None, 1, 2, 5, 100),
}
MAPS = [
    {},
    {"quantile": 0.25, "boost": 1.0},
    {"reshaper": "log_zscore", "weight_mean": 1.25, "weight_std": 0.75, "weight_min": 0.25, "weight_max": 2.0},
]
SAMPLED = st.sampled_from(["qwen3", "llama"]), st.sampled_from(["both", "left", "right"]), st.sampled_from(MAPS)
FEW_ROLLOUTS = [ROLLOUTS[name] for name in ("right, several boxes", "box at the start", "no box", "empty box")]


@pytest.mark.parametrize("method", METHODS)
@few(20)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(of) for name, of in OPTIONS.items()}), *SAMPLED)
def test_any_options(method: str, options: dict, family: str, padding: str, of_map: dict) -> None:
    """Responses of either sign get weights; the keys and values that fell out of an attention window are not shared."""
    windowed = family == "qwen3" and method == "perturbation" and padding != "right"
    rollouts = [*FEW_ROLLOUTS, dataclasses.replace(FEW_ROLLOUTS[0], advantage=0.0)]
    assert_matches(*subject(family, windowed), rollouts, method, padding, **options, **of_map)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_rollout(method: str, variant: str) -> None:
    got = assert_matches(*subject(), list(ROLLOUTS.values()), method, variant=variant)
    whole = (method, variant) == ("gradient", "grail_port")
    assert got.stats["answer_found_rate"] == 10 / 12
    assert got.stats["selected_rate"] == (10 if whole else 9) / 12  # one box is at the start
    assert ("gradient_norm_p10" in got.stats) == (method == "gradient")


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_advantage_zero_or_without_reasoning_need_no_forward(method: str) -> None:
    model = tiny_model(layers=1)
    zeros = [dataclasses.replace(rollout, advantage=0.0) for rollout in ROLLOUTS.values()]
    batch = make_batch([*zeros, ROLLOUTS["box at the start"], ROLLOUTS["no box"], ROLLOUTS["truncated box"]])
    with watch_inputs(model.get_input_embeddings()) as shapes:
        got = compute_token_weights(model, char_tokenizer(), *batch.tensors(), Oar(method))
    assert shapes == [] and torch.equal(got.weights, batch.response_mask.float())
    assert got.stats["selected_rate"] == 0.0


def test_counterfactuals_go_in_batches_behind_what_they_share() -> None:
    """A clean pass, then batches within the budget, each from its own first replaced token on."""
    model, plain = subject()
    rollout = ROLLOUTS["text after the box"]  # 15 prompt tokens, 19 reasoning tokens, 9 of the box
    expected, batch = assert_matches(model, plain, [rollout], "perturbation"), make_batch([rollout], "both").tensors()
    with watch_inputs(model.get_input_embeddings()) as shapes:
        got = compute_token_weights(model, char_tokenizer(), *batch, Oar("perturbation"), tokens=8 * 42 + 41)
    assert shapes == [(1, 42), (8, 42 - 15), (8, 42 - 23), (3, 42 - 31)]
    torch.testing.assert_close(got.scores, expected.scores, rtol=1e-5, atol=0, equal_nan=True)
    without_padding = PreTrainedTokenizerFast(tokenizer_object=char_tokenizer().backend_tokenizer)
    with pytest.raises(ValueError, match="pad"):
        compute_token_weights(model, without_padding, *batch, Oar("perturbation"))
