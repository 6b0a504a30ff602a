"""compute_token_weights against the plain computation of `reference.py`, and what it promises besides the numbers."""

import math
import tempfile
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from grail_advantage import Grail, Oar, Rollouts, TokenWeights
from grail_advantage.api import PlainHost
from grail_advantage.method import build
from tests.core.common import few, sampled, watch_inputs
from tests.core.plain_answers import PLAIN
from tests.core.reference import PlainModel, reference_weights, resolve
from tests.core.tiny_models import (
    ROLLOUTS,
    Batch,
    Rollout,
    char_tokenizer,
    compute,
    make_batch,
    rollouts_named,
    tiny_model,
)
from tests.documentation import files

LEAVES = ("embeddings", "first", "middle", "last")
MODELS = [(family, tied) for family in ("qwen3", "llama") for tied in (False, True)]
PASSES = [Grail("official"), Grail("robust"), Oar("gradient")]
FEW_ROLLOUTS = rollouts_named(
    "several boxes", "no box", "right, several boxes", "empty box"
)


@cache
def subject(
    family: str, tied: bool = False, layers: int = 4, double: bool = False
) -> tuple[Any, PlainModel]:
    """A model that no test may change, and its reference with what was computed so far."""
    model = tiny_model(family, tied=tied, layers=layers)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return (model.double() if double else model), PlainModel(model)


def assert_matches(
    model: nn.Module,
    plain: PlainModel,
    batch: Batch,
    preset: str,
    temperature: float = 1.0,
    **options,
) -> TokenWeights:
    """Weights, spans and, in the responses that need them, scores are those of the plain computation in float64.

    A model in float32 keeps four digits of its gradients and more, of which the logarithms' spread may take another one.
    """
    precision = {torch.float64: 1e-5, torch.float32: 1e-3}[model.dtype]
    config = Grail(preset, **options)
    tensors = [tensor.tolist() for tensor in batch.tensors()]
    got = compute(model, batch, config, temperature=temperature)
    expected = reference_weights(
        plain,
        *tensors,
        options=resolve(preset, **options),
        temperature=temperature,
    )
    assert [span and astuple(span) for span in got.spans] == expected.spans
    assert not got.weights.requires_grad and not got.scores.requires_grad
    weights = torch.tensor(expected.weights)
    assert_close(got.weights, weights, rtol=0, atol=3 * precision)
    scores = torch.tensor(expected.scores)
    # Outside the gate none is computed.
    outside = {
        "wrong": batch.advantages >= 0,
        "correct": batch.advantages <= 0,
        "all": batch.advantages == 0,
    }
    scores[outside[config.gate]] = math.nan
    rtol = 2 * precision
    assert_close(got.scores, scores, rtol=rtol, atol=1e-6 * rtol, equal_nan=True)
    return got


OPTIONS = {
    "leaf": list(LEAVES),
    "alignment": ["predictor", "token"],
    "gate": ["wrong", "correct", "all"],
    "target": ["span", "content"],
    "span": ["first", "last"],
}
"""Of scores; those of weights are tried in ``test_weights_by_hand.py``."""


@few(50)
@given(
    st.sampled_from(MODELS),
    st.sampled_from([4, 1, 2, 3]),
    st.sampled_from(["left", "right", "both"]),
    st.sampled_from([1.0, 0.25, 0.7, 3.0]),
    st.sampled_from(["official", "robust"]),
    st.fixed_dictionaries({}, optional=sampled(OPTIONS)),
)
def test_any_options_on_any_model(kind, layers, padding, temperature, preset, options):
    # These need no scores, and are rows like the others.
    zeros = [replace(rollout, advantage=0.0) for rollout in FEW_ROLLOUTS[::2]]
    batch = make_batch([*FEW_ROLLOUTS, *zeros], padding, extra=3)
    assert_matches(
        *subject(*kind, layers, double=True),
        batch,
        preset,
        temperature,
        **options,
    )


@pytest.mark.parametrize(
    ("family", "tied", "preset"), [("qwen3", False, "official"), ("llama", True, "robust")]
)
def test_presets_on_every_kind_of_rollout_in_float32(family, tied, preset):
    for leaf in LEAVES:
        batch = make_batch(list(ROLLOUTS.values()), "both")
        got = assert_matches(*subject(family, tied), batch, preset, 0.6, leaf=leaf)
    # These responses got scores; in those with a box, the tokens after it had none to get.
    assert (got.stats["selected_rate"], got.stats["answer_found_rate"]) == (8 / 12, 10 / 12)


def test_answers_in_another_format():
    texts = ("So #### 4 or #### -5.", "#### Step 2", "It is #### 1,0")
    # The second has no number after its mark.
    batch = make_batch([Rollout("Two?", text, -1.0) for text in texts])
    for preset, place in (("official", 0), ("robust", -1)):
        got = compute(tiny_model(layers=1), batch, Grail(preset), answer="hashes")
        expected = [(PLAIN["hashes"](text) or [None])[place] for text in texts]
        assert [span and astuple(span) for span in got.spans] == expected
        assert got.selected.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("target", "first", "last"), [("span", r"\boxed", "}"), ("content", "5}", "5}")]
)
def test_only_what_can_matter_is_computed(target, first, last):
    """One forward a selected response, up to the last target's predictor; logits at the targets' predictors alone."""
    model = tiny_model()
    rollout = ROLLOUTS["text after the box"]
    not_scored = rollouts_named("no box", "right", "no response")
    not_scored.append(replace(rollout, advantage=0.0))
    with watch_inputs(model.model.embed_tokens) as embedded:
        compute(model, make_batch(not_scored), Grail("official", target=target))
    assert embedded == []
    batch = make_batch([rollout, *not_scored], "both")
    # In the first call the model's positions are not known yet.
    compute(model, batch, Grail("official", target=target))
    with (
        watch_inputs(model.model.embed_tokens) as embedded,
        watch_inputs(model.lm_head) as headed,
    ):
        compute(model, batch, Grail("official", target=target))
    # The last target needs no forward of its own: it is predicted at the token before it.
    last_target = rollout.response.index(last)
    assert embedded == [(1, len(rollout.prompt) + last_target)]
    assert headed == [(1, last_target - rollout.response.index(first) + 1, 16)]


CPU = torch.device("cpu")
OFFLOADS = {
    "all": lambda model: cpu_offload(model, CPU),
    "one block": lambda model: cpu_offload(
        model.requires_grad_(False).model.layers[1], CPU
    ),
    "disk": lambda model: disk_offload(model, tempfile.mkdtemp(), CPU),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_an_offloaded_model_weighs_as_the_whole_one(name):
    batch = make_batch(rollouts_named("box at the end", "no box"))
    for method in PASSES:
        model = tiny_model()
        OFFLOADS[name](model)
        expected = compute(tiny_model(), batch, method).weights
        assert_close(compute(model, batch, method).weights, expected)
        assert any(values.is_meta for values in model.parameters())


@pytest.mark.parametrize("name", ["grail", "surprisal", "entropy"])
def test_the_hosts_of_the_documentation_weigh_the_same(name):
    """docs/own_trainer.md: the model in the process, and in three workers, of which one may have no row; with a pass, with
    a column that is there, and with one that the workers compute."""
    page = {}
    exec(files("own_trainer.md")["my_host.py"], page)
    batch = make_batch(rollouts_named("box at the end", "right", "text after the box"))
    model = tiny_model()
    tokenizer = char_tokenizer()
    inside = batch.response_mask.bool()
    log_probs = torch.linspace(-3, 0, inside.numel()).reshape(inside.shape)
    expected = compute(model, batch, build(name, {"gate": "all"}), old_log_probs=log_probs)
    *tensors, advantages = batch.tensors()
    r = Rollouts.from_padded(
        *tensors,
        advantages=advantages,
        columns={"old_log_probs": log_probs},
        tokenizer=tokenizer,
    )
    workers = [page["MyWorker"](model, tokenizer) for _ in range(3)]
    # Both compute the entropy themselves.
    for host in (PlainHost(model, r), page["MyHost"](workers, r)):
        advantages = page["token_advantages"](host, r, name, gate="all")[r.mask]
        assert_close(advantages, expected.advantages[inside])
        assert len(set(advantages.tolist())) > 2
