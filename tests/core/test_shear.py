"""SHEAR as a method: which hidden states it compares, and what becomes of rows without an opposite."""

from __future__ import annotations

import pytest
import torch

from grail_advantage import compute_token_weights
from grail_advantage.signals.shear import ShearConfig
from grail_advantage.signals.shear_distances import shear_scores
from tests.core.tiny_models import Rollout, char_tokenizer, make_batch, tiny_model

CONFIG = ShearConfig(window=8, stride=4)
ROLLOUTS = [
    Rollout("2+2?", r"two and two is \boxed{4}", 0.5),
    Rollout("2+2?", r"two and two is five, \boxed{5}", -0.5),
    Rollout("2+2?", "I do not know.", -0.5),
    Rollout("Another one?", r"yes: \boxed{1}", 1.0),
    Rollout("2+2?", r"truncated, \boxed{4} it is", 0.0),
    Rollout("Alone?", r"\boxed{1}", -1.0),
]
GROUPS = torch.tensor([7, 7, 7, 3, 7, 3])


def _plain_hidden_states(model: torch.nn.Module, rollout_index: int, batch) -> torch.Tensor:
    """The input of the output embeddings, by transformers' own hidden states: the last one comes after the final norm."""
    valid = batch.attention_mask[rollout_index].bool()
    tokens = batch.input_ids[rollout_index, valid]
    with torch.no_grad():
        states = model(input_ids=tokens[None], output_hidden_states=True).hidden_states[-1][0]
    return states[batch.response_mask[rollout_index, valid].bool()]


def test_scores_are_those_of_the_groups_hidden_states() -> None:
    model, batch = tiny_model(), make_batch(ROLLOUTS, padding="both")
    got = compute_token_weights(model, char_tokenizer(), *batch.tensors(), CONFIG, groups=GROUPS)
    hidden = [_plain_hidden_states(model, row, batch) for row in range(len(ROLLOUTS))]
    options = {"window": 8, "stride": 4, "epsilon": 0.05, "iterations": 200, "tolerance": 1e-3}
    for members in ([0, 1, 2], [3, 5]):
        positive = [ROLLOUTS[row].advantage > 0 for row in members]
        expected = shear_scores([hidden[row] for row in members], positive, **options)
        for row, scores_T in zip(members, expected, strict=True):
            inside = batch.response_mask[row].bool()
            torch.testing.assert_close(got.scores[row, inside], scores_T, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(got.weights[row, inside], scores_T, rtol=1e-4, atol=1e-6)
            assert (got.weights[row, inside] != 1).any()
    # The row without an advantage is on neither side: it weighs 1, and nobody is compared with it.
    assert (got.weights[4, batch.response_mask[4].bool()] == 1).all()


def test_a_group_with_one_outcome_weighs_one() -> None:
    batch = make_batch([ROLLOUTS[1], ROLLOUTS[2]], padding="right")
    got = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG, groups=torch.tensor([0, 0]))
    assert (got.weights[batch.response_mask.bool()] == 1).all()


def test_groups_are_needed_and_not_negative() -> None:
    """Within a pass negative ones mark the rows that belong to nobody, which weigh 1."""
    batch = make_batch(ROLLOUTS[:2])
    with pytest.raises(ValueError, match="shear reads groups; pass groups="):
        compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG)
    with pytest.raises(ValueError, match="groups holds -7; numbers must be at least 0"):
        compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG, groups=torch.tensor([-7, -7]))
