"""SHEAR as a method: which hidden states it compares, and what becomes of rows without an opposite."""

from __future__ import annotations

import pytest
import torch

from grail_advantage import compute_token_weights
from grail_advantage.methods import methods
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


def test_groups_are_compared_on_their_own() -> None:
    model = tiny_model()
    both = make_batch(ROLLOUTS, padding="left")
    together = compute_token_weights(model, char_tokenizer(), *both.tensors(), CONFIG, groups=GROUPS)
    alone = make_batch([ROLLOUTS[3], ROLLOUTS[5]], padding="left")
    apart = compute_token_weights(model, char_tokenizer(), *alone.tensors(), CONFIG, groups=torch.tensor([0, 0]))
    for row, other in ((3, 0), (5, 1)):
        of_row = together.weights[row, both.response_mask[row].bool()]
        assert torch.equal(of_row, apart.weights[other, alone.response_mask[other].bool()])


def test_a_group_with_one_outcome_weighs_one() -> None:
    batch = make_batch([ROLLOUTS[1], ROLLOUTS[2]], padding="right")
    got = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG, groups=torch.tensor([0, 0]))
    assert (got.weights[batch.response_mask.bool()] == 1).all()


def test_normalize_mass_keeps_a_rows_sum() -> None:
    batch = make_batch(ROLLOUTS[:2], padding="right")
    config = ShearConfig(window=8, stride=4, normalize_mass=True)
    got = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), config, groups=torch.tensor([0, 0]))
    torch.testing.assert_close(got.weights.sum(dim=1), batch.response_mask.sum(dim=1).float(), rtol=1e-5, atol=0)
    assert got.stats["advantage_scale"] == pytest.approx(1.0, rel=1e-5)


def test_a_row_with_hidden_states_that_are_not_finite_weighs_one_and_spoils_no_other() -> None:
    model, batch = tiny_model(), make_batch(ROLLOUTS[:3], padding="right")
    without = make_batch(ROLLOUTS[:2], padding="right")
    expected = compute_token_weights(model, char_tokenizer(), *without.tensors(), CONFIG, groups=torch.tensor([0, 0]))
    broken = batch.input_ids[2, batch.response_mask[2].bool()]
    calls = []

    def spoil(_module, args, output):
        calls.append(1)
        if args[0].shape[1] == int(batch.attention_mask[2].sum()):
            output = output * float("nan")
        return output

    handle = model.model.norm.register_forward_hook(spoil)
    try:
        got = compute_token_weights(model, char_tokenizer(), *batch.tensors(), CONFIG, groups=torch.tensor([0, 0, 0]))
    finally:
        handle.remove()
    assert len(broken) and len(calls) == 3
    assert got.stats["non_finite_rate"] == pytest.approx(1 / 3)
    assert (got.weights[2, batch.response_mask[2].bool()] == 1).all()
    for row in (0, 1):
        of_row = got.weights[row, batch.response_mask[row].bool()]
        assert torch.equal(of_row, expected.weights[row, without.response_mask[row].bool()])


def test_needs_groups() -> None:
    batch = make_batch(ROLLOUTS[:2])
    with pytest.raises(ValueError, match="shear reads groups; pass groups="):
        compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG)


def test_negative_groups_are_refused() -> None:
    """Within a pass they mark the rows that belong to nobody, which weigh 1."""
    batch = make_batch(ROLLOUTS[:2])
    with pytest.raises(ValueError, match="groups holds -7; numbers must be at least 0"):
        compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CONFIG, groups=torch.tensor([-7, -7]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"shear\.window=0 must be a whole number, at least 1"),
        ({"stride": 0}, r"shear\.stride=0 must be a whole number"),
        ({"window": 10, "stride": 11}, r"shear\.stride=11 is greater than shear\.window=10"),
        ({"epsilon": 0}, r"shear\.epsilon=0\.0 must be greater than 0"),
        ({"iterations": 0}, r"shear\.iterations=0"),
        ({"tolerance": -1}, r"shear\.tolerance=-1\.0 must be greater than 0"),
        ({"leaf": "middle"}, r"shear\.leaf is not an option; it is one of grail"),
    ],
)
def test_what_is_refused_and_how(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods()["shear"].build(options)
