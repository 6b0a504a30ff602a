"""OAR-G and OAR-P (arXiv 2601.07408) against a plain computation, and what they promise besides the numbers.

The plain computation shares nothing with the package. Every row goes alone and whole through a float64 model; OAR-G adds its
noise to `inputs_embeds`, OAR-P runs one full forward for each replaced token; all after the logits is Python floats in loops.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedTokenizerFast

from grail_advantage import Oar, TokenWeights
from tests.core.common import few, watch_inputs
from tests.core.plain_weights import MAPS, to_mass
from tests.core.reference import Span, boxed_spans
from tests.core.tiny_models import (
    PAD_ID,
    ROLLOUTS,
    Rollout,
    char_tokenizer,
    compute,
    encode,
    make_batch,
    tiny_model,
)

OF_MAP = {
    "bilevel": ("quantile", "boost"),
    "log_zscore": ("weight_mean", "weight_std", "weight_min", "weight_max"),
}


class PlainOar:
    """A float64 copy of a model in evaluation mode."""

    def __init__(self, model: torch.nn.Module, pad: int) -> None:
        self.model = copy.deepcopy(model).double().eval()
        self.pad = pad

    def embed(self, ids: list[int]) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(ids)).detach()

    def probe(
        self, embeds: torch.Tensor, ids: list[int], start: int, span: Span, probe: str
    ) -> torch.Tensor:
        """(V,) probabilities, or the scalar log-likelihood a token; with a gradient to `embeds` (S, D)."""
        logits = self.model(inputs_embeds=embeds.unsqueeze(0), use_cache=False).logits[0]
        answer = [start + t for t in range(span[0], span[3])]
        if probe == "answer_joint":
            return sum(logits[p - 1].log_softmax(-1)[ids[p]] for p in answer) / len(answer)
        if probe == "last":
            return logits[-1].softmax(-1)
        return (sum(logits[p - 1] for p in answer) / len(answer)).softmax(-1)

    @staticmethod
    def apart(clean: torch.Tensor, changed: torch.Tensor, probe: str) -> torch.Tensor:
        if probe == "answer_joint":
            return clean - changed
        return (clean * (clean.log() - changed.log())).sum()

    def gradient_scores(
        self, ids: list[int], start: int, span: Span, options: dict
    ) -> list[float]:
        """Scores of the response tokens, NaN where there is none."""
        port = options["variant"] == "grail_port"
        # The port shakes the predictor positions of all response tokens, the others the reasoning's own.
        noisy = range(start - 1, len(ids) - 1) if port else range(start, start + span[0])
        content = str(ids[: start + span[3]]).strip("[]").replace(" ", "")
        digest = hashlib.sha256(
            f"{options['noise_seed']}/{STEP}/{content}".encode()
        ).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        clean = self.embed(ids)
        shaken = clean.clone()
        noise = torch.randn((len(noisy), clean.shape[1]), generator=generator).double()
        shaken[list(noisy)] += options["noise_std"] * noise
        shaken.requires_grad_()
        with torch.no_grad():
            unshaken = self.probe(clean, ids, start, span, options["probe"])
        loss = self.apart(
            unshaken,
            self.probe(shaken, ids, start, span, options["probe"]),
            options["probe"],
        )
        (gradient,) = torch.autograd.grad(loss, shaken)
        scores = [math.nan] * (len(ids) - start)
        for t, position in enumerate(noisy):
            pairs = zip(
                gradient[position].tolist(),
                (shaken if port else clean)[position].tolist(),
                strict=True,
            )
            scores[t] = abs(math.fsum(g * e for g, e in pairs))
        return scores

    @torch.no_grad()
    def perturbation_scores(
        self, ids: list[int], start: int, span: Span, options: dict
    ) -> list[float]:
        clean = self.probe(self.embed(ids), ids, start, span, options["probe"])
        reasoning = span[0]
        limit = options["max_perturbations"]
        chosen = list(range(reasoning))
        if limit is not None and limit < reasoning:
            # 5 of 19 tokens are 0, 4, 9, 14 and 18.
            chosen = [round(k * (reasoning - 1) / max(limit - 1, 1)) for k in range(limit)]
        exact = {}
        for t in chosen:
            replaced = [*ids[: start + t], self.pad, *ids[start + t + 1 :]]
            # The replaced row is what the model reads; the answer asked for is that of the row itself.
            changed = self.probe(self.embed(replaced), ids, start, span, options["probe"])
            exact[t] = float(self.apart(clean, changed, options["probe"]))
        scores = [math.nan] * (len(ids) - start)
        for t in range(reasoning):
            # Linear between the replaced tokens on both sides.
            left_place = max((c for c in chosen if c <= t), default=chosen[0])
            right = min((c for c in chosen if c >= t), default=chosen[-1])
            share = (t - left_place) / (right - left_place) if right > left_place else 0.0
            scores[t] = exact[left_place] + share * (exact[right] - exact[left_place])
        return scores


def row_weights(
    method: str, scores: list[float], span: Span | None, advantage: float, options: dict
) -> list[float]:
    """Weights of one response from its tokens' scores."""
    weights = [1.0] * len(scores)
    port = options["variant"] == "grail_port"
    members = 0
    if span is not None and advantage != 0:
        # The port compares the tokens of the whole response.
        members = len(scores) if port and method == "gradient" else span[0]
    if members:
        numbers = {name: options[name] for name in OF_MAP[options["reshaper"]]}
        if options["reshaper"] == "bilevel":
            numbers["quantile_rule"] = "sorted" if port else "linear"
        values = MAPS[options["reshaper"]](scores[:members], **numbers)
        weights[:members] = (
            to_mass(values, range(members)) if options["normalize_mass"] else values
        )
    return weights


METHODS = ("gradient", "perturbation")
STEP = 3  # each has noise of its own
VARIANTS = ("official", "grail_port")
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
"""The first block sees everything, the others the last six positions: a cache that cannot be shared."""


@cache
def subject(family: str = "qwen3", windowed: bool = False) -> tuple[Any, PlainOar]:
    """A float64 model that no test may change, and its reference with what was computed so far."""
    model = tiny_model(family, layers=2, **(WINDOW if windowed else {})).double()
    return model, PlainOar(model, PAD_ID)


def assert_matches(
    model: nn.Module,
    plain: PlainOar,
    rollouts: list[Rollout],
    method: str,
    padding: str = "both",
    **options: Any,
) -> TokenWeights:
    """Weights, and in the responses that need them scores, are those of the plain computation.

    RMSNorm and RoPE compute in float32 in any model; of its seven digits the noise leaves the gradient three.
    """
    tolerance = {"gradient": 1e-3, "perturbation": 1e-5}[method]
    config = Oar(method, **options)
    batch = make_batch(rollouts, padding)
    got = compute(model, batch, config, step=STEP)
    options = config.model_dump()
    values = batch.of_responses(got.weights), batch.of_responses(got.scores), got.spans
    for rollout, weights, scores, span_found in zip(rollouts, *values, strict=True):
        prompt = encode(rollout.prompt)
        response = encode(rollout.response)
        advantage = rollout.advantage
        span = next(reversed(boxed_spans(rollout.response)), None)
        assert (span_found and dataclasses.astuple(span_found)) == span
        expected_scores = [math.nan] * len(response)
        if span is not None:
            read = (
                plain.gradient_scores if method == "gradient" else plain.perturbation_scores
            )
            expected_scores = read(prompt + response, len(prompt), span, options)
        expected = row_weights(method, expected_scores, span, advantage, options)
        assert weights == pytest.approx(expected, rel=20 * tolerance, abs=20 * tolerance)
        if (
            span is None
            or advantage == 0
            or (config.statistics == "reasoning" and span[0] == 0)
        ):
            assert all(map(math.isnan, scores))
        else:
            largest = max(abs(score) for score in expected_scores if not math.isnan(score))
            assert scores == pytest.approx(
                expected_scores, rel=tolerance, abs=tolerance * largest, nan_ok=True
            )
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
OF_MAPS = [
    {},
    {"quantile": 0.25, "boost": 1.0},
    {
        "reshaper": "log_zscore",
        "weight_mean": 1.25,
        "weight_std": 0.75,
        "weight_min": 0.25,
        "weight_max": 2.0,
    },
]
SAMPLED = (
    st.sampled_from(["qwen3", "llama"]),
    st.sampled_from(["both", "left", "right"]),
    st.sampled_from(OF_MAPS),
)
FEW_ROLLOUTS = [
    ROLLOUTS[name]
    for name in ("right, several boxes", "box at the start", "no box", "empty box")
]


@pytest.mark.parametrize("method", METHODS)
@few(20)
@given(
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()}
    ),
    *SAMPLED,
)
def test_any_options(
    method: str, options: dict, family: str, padding: str, of_map: dict
) -> None:
    """Responses of either sign get weights; the keys and values that fell out of an attention window are not shared."""
    windowed = family == "qwen3" and method == "perturbation" and padding != "right"
    rollouts = [*FEW_ROLLOUTS, dataclasses.replace(FEW_ROLLOUTS[0], advantage=0.0)]
    assert_matches(
        *subject(family, windowed), rollouts, method, padding, **options, **of_map
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_rollout(method: str, variant: str) -> None:
    got = assert_matches(*subject(), list(ROLLOUTS.values()), method, variant=variant)
    is_port = (method, variant) == ("gradient", "grail_port")
    assert got.stats["answer_found_rate"] == 10 / 12
    # One box is at the start.
    assert got.stats["selected_rate"] == (10 if is_port else 9) / 12
    assert ("gradient_norm_p10" in got.stats) == (method == "gradient")


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_advantage_zero_or_without_reasoning_need_no_forward(method: str) -> None:
    model = tiny_model(layers=1)
    zeros = [dataclasses.replace(rollout, advantage=0.0) for rollout in ROLLOUTS.values()]
    batch = make_batch(
        [
            *zeros,
            ROLLOUTS["box at the start"],
            ROLLOUTS["no box"],
            ROLLOUTS["truncated box"],
        ]
    )
    with watch_inputs(model.get_input_embeddings()) as shapes:
        got = compute(model, batch, Oar(method))
    assert shapes == [] and torch.equal(got.weights, batch.response_mask.float())
    assert got.stats["selected_rate"] == 0.0


def test_counterfactuals_go_in_batches_behind_what_they_share() -> None:
    """A clean pass, then batches within the budget, each from its own first replaced token on."""
    model, plain = subject()
    # 15 prompt tokens, 19 reasoning tokens, 9 of the box
    rollout = ROLLOUTS["text after the box"]
    expected = assert_matches(model, plain, [rollout], "perturbation")
    batch = make_batch([rollout], "both")
    with watch_inputs(model.get_input_embeddings()) as shapes:
        got = compute(model, batch, Oar("perturbation"), tokens=8 * 42 + 41)
    assert shapes == [(1, 42), (8, 42 - 15), (8, 42 - 23), (3, 42 - 31)]
    torch.testing.assert_close(
        got.scores, expected.scores, rtol=1e-5, atol=0, equal_nan=True
    )
    without_padding = PreTrainedTokenizerFast(
        tokenizer_object=char_tokenizer().backend_tokenizer
    )
    with pytest.raises(ValueError, match="pad"):
        compute(model, batch, Oar("perturbation"), without_padding)
