"""OAR-G and OAR-P (arXiv 2601.07408) against a plain computation, and what they promise besides the numbers.

The plain computation shares nothing with the package. Every row goes alone and whole through a float64 model; OAR-G adds its
noise to `inputs_embeds`, OAR-P runs one full forward for each replaced token; scores are computed one at a time.
"""

import dataclasses
import hashlib
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from grail_advantage import AnswerSpan, Oar, TokenWeights
from tests.core.common import few, sampled, watch_inputs
from tests.core.plain_weights import Row, through_map
from tests.core.reference import boxed_spans
from tests.core.tiny_models import (
    PAD_ID,
    ROLLOUTS,
    Rollout,
    char_tokenizer,
    compute,
    encode,
    make_batch,
    rollouts_named,
    tiny_model,
)


def embed(model: nn.Module, ids: list[int]) -> Tensor:
    return model.get_input_embeddings()(torch.tensor(ids)).detach()


def read(
    model: nn.Module,
    embeds: Tensor,
    ids: list[int],
    start: int,
    span: AnswerSpan,
    probe: str,
) -> Tensor:
    """(V,) probabilities, or the scalar log-likelihood a token; with a gradient to `embeds` (S, D)."""
    logits = model(inputs_embeds=embeds.unsqueeze(0), use_cache=False).logits[0]
    answer = range(start + span.start, start + span.end)
    if probe == "answer_joint":
        return sum(logits[p - 1].log_softmax(-1)[ids[p]] for p in answer) / len(answer)
    if probe == "last":
        return logits[-1].softmax(-1)
    return (sum(logits[p - 1] for p in answer) / len(answer)).softmax(-1)


def apart(clean: Tensor, changed: Tensor, probe: str) -> Tensor:
    if probe == "answer_joint":
        return clean - changed
    return (clean * (clean.log() - changed.log())).sum()


def gradient_scores(
    model: nn.Module, ids: list[int], start: int, span: AnswerSpan, options: dict
) -> list[float]:
    """Scores of the response tokens, NaN where there is none."""
    port = options["variant"] == "grail_port"
    # The port shakes the predictor positions of all response tokens, the others the reasoning's own.
    noisy = range(start - 1, len(ids) - 1) if port else range(start, start + span.start)
    content = str(ids[: start + span.end]).strip("[]").replace(" ", "")
    digest = hashlib.sha256(f"{options['noise_seed']}/{STEP}/{content}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    clean = embed(model, ids)
    shaken = clean.clone()
    noise = torch.randn((len(noisy), clean.shape[1]), generator=generator).double()
    shaken[list(noisy)] += options["noise_std"] * noise
    shaken.requires_grad_()
    probe = options["probe"]
    unshaken = read(model, clean, ids, start, span, probe).detach()
    loss = apart(unshaken, read(model, shaken, ids, start, span, probe), probe)
    (gradient,) = torch.autograd.grad(loss, shaken)
    embeddings = (shaken if port else clean).detach()
    scores = [math.nan] * (len(ids) - start)
    for t, position in enumerate(noisy):
        scores[t] = abs(float(gradient[position] @ embeddings[position]))
    return scores


@torch.no_grad()
def perturbation_scores(
    model: nn.Module, ids: list[int], start: int, span: AnswerSpan, options: dict
) -> list[float]:
    probe = options["probe"]
    clean = read(model, embed(model, ids), ids, start, span, probe)
    limit = options["max_perturbations"]
    chosen = list(range(span.start))
    if limit is not None and limit < span.start:
        # 5 of 19 tokens are 0, 4, 9, 14 and 18.
        chosen = [round(k * (span.start - 1) / max(limit - 1, 1)) for k in range(limit)]
    exact = []
    for t in chosen:
        replaced = [*ids[: start + t], PAD_ID, *ids[start + t + 1 :]]
        # The replaced row is what the model reads; the answer asked for is that of the row itself.
        changed = read(model, embed(model, replaced), ids, start, span, probe)
        exact.append(float(apart(clean, changed, probe)))
    scores = [math.nan] * (len(ids) - start)
    if chosen:
        # Linear between the replaced tokens on both sides.
        scores[: span.start] = np.interp(range(span.start), chosen, exact).tolist()
    return scores


def row_weights(
    scores: list[float],
    span: AnswerSpan | None,
    advantage: float,
    options: dict,
) -> list[float]:
    """Weights of one response from its tokens' scores."""
    port = options["variant"] == "grail_port"
    (weights,) = through_map(
        [Row(advantage, scores, span=span)],
        lambda row: row.log_probs,
        "bilevel",
        "all",
        # The port compares the tokens of the whole response.
        "response" if port and options["method"] == "gradient" else "reasoning",
        options["normalize_mass"],
        quantile=options["quantile"],
        boost=options["boost"],
        quantile_rule="sorted" if port else "linear",
    )
    return weights


METHODS = ("gradient", "perturbation")
STEP = 3  # each has noise of its own
VARIANTS = ("official", "grail_port")
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
"""The first block sees everything, the others the last six positions: a cache that cannot be shared."""


@cache
def subject(family: str = "qwen3", windowed: bool = False):
    """A float64 model that no test may change."""
    return tiny_model(family, layers=2, **(WINDOW if windowed else {})).double()


def assert_matches(
    model: nn.Module, rollouts: list[Rollout], method: str, padding: str = "both", **options
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
    for rollout, weights, scores, span in zip(rollouts, *values, strict=True):
        prompt = encode(rollout.prompt)
        response = encode(rollout.response)
        advantage = rollout.advantage
        expected_span = next(reversed(boxed_spans(rollout.response)), None)
        assert (span and dataclasses.astuple(span)) == expected_span
        expected_scores = [math.nan] * len(response)
        if span is not None:
            plain = gradient_scores if method == "gradient" else perturbation_scores
            expected_scores = plain(model, prompt + response, len(prompt), span, options)
        expected = row_weights(expected_scores, span, advantage, options)
        assert weights == pytest.approx(expected, rel=20 * tolerance, abs=20 * tolerance)
        if (
            span is None
            or advantage == 0
            or (config.statistics == "reasoning" and span.start == 0)
        ):
            assert all(map(math.isnan, scores))
        else:
            largest = np.nanmax(np.abs(expected_scores))
            assert scores == pytest.approx(
                expected_scores, rel=tolerance, abs=tolerance * largest, nan_ok=True
            )
    return got


OPTIONS = {
    "variant": VARIANTS,
    "probe": ("answer_mean", "last", "answer_joint"),
    "normalize_mass": (True, False),
    "noise_std": (1e-3, 0.02),
    "noise_seed": (0, 7),
    "max_perturbations": (None, 1, 2, 5, 100),
    "quantile": (0.4, 0.25),
    "boost": (2.0, 1.0),
}
"""Those of other maps are tried with GRAIL, in ``test_weights_by_hand.py``."""
FEW_ROLLOUTS = rollouts_named(
    "right, several boxes", "box at the start", "no box", "empty box"
)


@pytest.mark.parametrize("method", METHODS)
@few(20)
@given(
    st.fixed_dictionaries({}, optional=sampled(OPTIONS)),
    st.sampled_from(["qwen3", "llama"]),
    st.sampled_from(["both", "left", "right"]),
)
def test_any_options(method, options, family, padding):
    """Responses of either sign get weights; the keys and values that fell out of an attention window are not shared."""
    windowed = family == "qwen3" and method == "perturbation" and padding != "right"
    rollouts = [*FEW_ROLLOUTS, dataclasses.replace(FEW_ROLLOUTS[0], advantage=0.0)]
    model = subject(family, windowed)
    assert_matches(model, rollouts, method, padding, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_rollout(method, variant):
    got = assert_matches(subject(), list(ROLLOUTS.values()), method, variant=variant)
    is_port = (method, variant) == ("gradient", "grail_port")
    assert got.stats["answer_found_rate"] == 10 / 12
    # One box is at the start.
    assert got.stats["selected_rate"] == (10 if is_port else 9) / 12
    assert ("gradient_norm_p10" in got.stats) == (method == "gradient")


def test_counterfactuals_go_in_batches_behind_what_they_share():
    """A clean pass, then batches within the budget, each from its own first replaced token on."""
    model = subject()
    # 15 prompt tokens, 19 reasoning tokens, 9 of the box
    rollout = ROLLOUTS["text after the box"]
    expected = assert_matches(model, [rollout], "perturbation")
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
