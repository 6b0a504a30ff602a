"""The effect of an update, where it is known: of a model without layers whose embeddings alone are trained, so that
tokens after different tokens share no parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grail_advantage.api import PlainHost
from grail_advantage.data import OLD_LOG_PROBS, Rollouts, Weighed
from grail_advantage.effect import effect_figures, rank_correlation
from tests.core.common import rollouts_of, weighed
from tests.core.test_weights_by_hand import Advantages

RATE = 1e-3


def without_layers() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=0, tie_word_embeddings=False, **shape)).eval()
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    return model


def log_probs(model: LlamaForCausalLM, r: Rollouts) -> Tensor:
    return PlainHost(model, r).columns([OLD_LOG_PROBS])[OLD_LOG_PROBS]


def step(model: LlamaForCausalLM, r: Rollouts, advantages: Tensor) -> None:
    """Of plain gradient descent on ``-sum A log p``, each token after the one before it."""
    vectors = model.get_input_embeddings().weight
    for prompt, response, of in zip(r.prompts, r.responses, advantages, strict=True):
        ids = torch.cat([prompt, response])
        each = model(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        (-(of[: len(response)] * each[len(prompt) - 1 :]).sum()).backward()
    with torch.no_grad():
        vectors -= RATE * vectors.grad


def figures_of(w: Weighed, effect: Tensor) -> dict[str, float]:
    return effect_figures(w.advantages, effect, w.rollouts.mask)


def test_what_an_unrelated_update_did_is_seen() -> None:
    """Each token comes after a token of its own. The right update moves all with their advantage, and in its order
    where gradients are alike; an update of other responses moves none."""
    advantages = torch.tensor([[0.0, 1.0, 2.0, -1.0], [0.0, -2.0, 0.5, 3.0]])
    r = rollouts_of([[2, 11, 12, 13], [3, 21, 22, 23]], [1.0, 1.0])
    w = weighed(Advantages.model_construct(), r, advantages)
    other = rollouts_of([[30, 31], [40, 41]], [1.0, 1.0]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    figures = []
    for update in ((r, w.advantages), other):
        model = without_layers()
        before = log_probs(model, r)
        step(model, *update)
        figures.append(figures_of(w, log_probs(model, r) - before))
    assert figures[0]["moved_with_advantage_rate"] == 1 and figures[0]["credit_change_correlation"] > 0.7
    assert figures[1] == {"moved_with_advantage_rate": 0.0}


def test_the_figures_by_hand() -> None:
    r = rollouts_of([[5, 6, 7], [8, 9]], [1.0, -1.0])
    w = weighed(Advantages.model_construct(), r, torch.tensor([[2.0, 0.0, 1.0], [-1.0, -1.0, 0.0]]))
    effect = torch.tensor([[0.3, -0.5, -0.1], [-0.2, 0.1, math.nan]])
    # Of the tokens with an advantage 2 of 4 move with it; A_t varies in the first response alone.
    assert figures_of(w, effect) == {
        "moved_with_advantage_rate": 0.5,
        "credit_change_correlation": pytest.approx(1.0),
    }
    assert figures_of(w, torch.full_like(effect, math.nan)) == {}


def test_rank_correlation() -> None:
    """By hand with ties: ranks 1.5, 1.5, 3 and 1, 2, 3."""
    assert rank_correlation(np.array([4.0, 4.0, 9.0]), np.array([-1.0, 0.0, 7.0])) == pytest.approx(0.75**0.5)
    assert math.isnan(rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])))
    assert math.isnan(rank_correlation(np.array([]), np.array([])))
