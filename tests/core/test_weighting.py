"""Response selection, alignment and GRAIL's weights from given scores, by hand and against the plain computation."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan, Grail, RolloutBatch
from grail_advantage.batch import outcome_of
from grail_advantage.signals.grail import target_range
from grail_advantage.signals.saliency import align_scores
from grail_advantage.weighting import BatchWeights, apply_token_weights, batch_weights
from tests.core import reference
from tests.core.common import few

NAN = math.nan
SPAN = AnswerSpan(3, 4, 5, 6)  # three reasoning tokens, opening, one content token, closing; the rest is after it


def log_scores(*rows: list[float]) -> torch.Tensor:
    """Scores (B, T) whose `log(s + 1e-8)` is as given."""
    return torch.tensor([[math.exp(value) - 1e-8 for value in row] for row in rows])


def weigh(
    scores: torch.Tensor,
    spans: list[AnswerSpan | None],
    advantages: list[float],
    config: Grail,
    mask: list[list[int]] | None = None,
) -> BatchWeights:
    mask_BT = torch.ones(scores.shape, dtype=torch.bool) if mask is None else torch.tensor(mask) > 0
    batch = RolloutBatch(mask_BT, torch.tensor(advantages), spans, {})
    return batch_weights(scores, batch, config.select(batch), config)


TWO = torch.ones(2, 3)
PARTS = {
    "mask_BT": TWO.bool(),
    "advantages_B": torch.tensor([1.0, -1.0]),
    "spans": [None, None],
    "columns_BT": {"entropy": TWO},
    "examples": [None, None],
    "step": 0,
}


def test_a_batch_whose_parts_do_not_fit_is_refused() -> None:
    RolloutBatch(**PARTS)
    for change, words in (
        ({"mask_BT": TWO}, r"mask_BT must be bool of shape \(B, T\), got torch.float32 of shape \(2, 3\)"),
        ({"mask_BT": [[True] * 3] * 2}, "mask_BT must be a tensor, got list"),
        ({"advantages_B": TWO}, r"advantages_B must be numbers of shape \(2,\), got .* of shape \(2, 3\)"),
        ({"spans": [None]}, "spans must be one a response, 2 of them; got 1"),
        ({"examples": [None] * 3}, "examples must be one a response, 2 of them; got 3"),
        ({"columns_BT": {"entropy": torch.ones(2, 4)}}, r"columns_BT\['entropy'\] .* shape \(2, 3\).* got .*\(2, 4\)"),
        ({"columns_BT": {"entropy": TWO.long()}}, r"columns_BT\['entropy'\] must be floats.* got torch.int64"),
        ({"step": -3}, "step=-3 must be at least 0"),
        ({"tokens_BT": TWO[:, :2].long()}, r"tokens_BT must be torch\.int64 of shape \(2, 3\)"),
        ({"groups_B": torch.ones(2)}, r"groups_B must be torch\.int64"),
        ({"masked_B": torch.ones(2).long()}, r"masked_B must be torch\.bool"),
        ({"fields": {"blame": [1]}}, r"fields\['blame'\] must be one a response"),
    ):
        with pytest.raises(ValueError, match=words):
            RolloutBatch(**PARTS | change)


def test_a_reward_is_right_above_0() -> None:
    rewards = (1.0, 0.25, 0.0, -1.0, None, math.nan, math.inf)
    assert [outcome_of(reward) for reward in rewards] == ["right", "right", "wrong", "wrong", None, None, None]


def close(got: torch.Tensor, expected: list[list[float]]) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "inside", "selected"),
    [
        # advantages -1 and +1, then both without a span; last a 0, which is never selected
        ("wrong", [True, False, True, False], [True, False, False, False, False]),
        ("correct", [False, True, False, True], [False, True, False, False, False]),
        ("all", [True, True, True, True], [True, True, False, False, False]),
    ],
)
def test_row_selection(gate: str, inside: list[bool], selected: list[bool]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0], dtype=dtype)
        batch = RolloutBatch(torch.ones(5, 6).bool(), advantages, [SPAN, SPAN, None, None, SPAN], {})
        rows = Grail(gate=gate).select(batch)
        assert rows.answered_B.tolist() == [True, True, False, False, True]
        assert rows.inside_gate_B[:4].tolist() == inside
        assert rows.selected_B.tolist() == selected


def test_target_range() -> None:
    empty = AnswerSpan(3, 5, 5, 6)
    assert target_range(AnswerSpan(3, 4, 7, 9), "content") == (4, 7)
    assert target_range(empty, "content") == target_range(empty, "span") == (3, 6)


def test_alignment() -> None:
    for length, alignment, expected in (
        # Position 10 is the first token's predictor, so token 0 sits at position 11.
        (5, "predictor", [10.0, 11.0, 12.0, 13.0, 0.0]),
        (5, "token", [11.0, 12.0, 13.0, 0.0, 0.0]),
        (3, "token", [11.0, 12.0, 13.0]),
        (2, "predictor", [10.0, 11.0]),
        (2, "token", [11.0, 12.0]),
    ):
        assert align_scores(torch.tensor([10.0, 11.0, 12.0, 13.0]), length, alignment).tolist() == expected


def test_official_by_hand() -> None:
    # Logs of all seven tokens: mean 0, variance 18 / 7, so z = l / 1.603567. Overrides: boundary and post 1, content 5.
    scores = log_scores([-1, 0, 1, 2, 2, -2, -2])
    got = weigh(scores, [SPAN], [-1.0], Grail("official"))
    close(got.weights_BT, [[1 - 0.311805, 1.0, 1 + 0.311805, 1.0, 5.0, 1.0, 1.0]])
    assert got.from_scores_BT.tolist() == [[True, True, True, False, False, False, False]]
    assert not got.at_lower_bound_BT.any() and not got.at_upper_bound_BT.any()
    scores[0, 1] = NAN
    broken = weigh(scores, [SPAN], [-1.0], Grail("official"))
    assert broken.non_finite_B.tolist() == [True] and broken.weights_BT.tolist() == [[1.0] * 7]


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_a_token_that_does_not_train_is_compared_with_none(preset: str) -> None:
    """Such as a tool's output between two turns of the reasoning."""
    plain = weigh(torch.tensor([[9.0, 2, 4, 8, 7, 6]]), [AnswerSpan(3, 4, 5, 6)], [-1.0], Grail(preset))
    scores, mask = torch.tensor([[9.0, 5, 2, 4, 8, 7, 6]]), [[1, 0, 1, 1, 1, 1, 1]]
    weights = weigh(scores, [AnswerSpan(4, 5, 6, 7)], [-1.0], Grail(preset), mask).weights_BT[0]
    assert weights[1] == 0 and torch.equal(weights[[0, 2, 3, 4, 5, 6]], plain.weights_BT[0])


def test_upper_bound_is_flagged() -> None:
    # Nine logs 0 and one 10: mean 1, variance 9, z = -1/3 and 3, weights 0.833333 and 2.5.
    span = AnswerSpan(10, 11, 12, 13)
    scores = log_scores([0] * 9 + [10] + [0] * 3)
    config = Grail("robust", weight_max=2.25, normalize_mass=False, content_weight=0.75)
    got = weigh(scores, [span], [-1.0], config)
    close(got.weights_BT, [[0.833333] * 9 + [2.25, 1.0, 0.75, 1.0]])
    assert got.at_upper_bound_BT.tolist() == [[False] * 9 + [True] + [False] * 3]
    assert not got.at_lower_bound_BT.any()


def scores_of(draw: random.Random, length: int) -> list[float]:
    """Over many orders of magnitude, with zeros among them; in float32."""
    values = [0.0 if draw.random() < 0.1 else math.exp(draw.gauss(-3, 3)) for _ in range(length)]
    return torch.tensor(values).tolist()


@few(50)
@given(
    seed=st.integers(0, 10_000),
    preset=st.sampled_from(["official", "robust"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "statistics": st.sampled_from(["response", "reasoning"]),
            "reshaper": st.sampled_from(["log_zscore", "bilevel", "power", "mean_ratio"]),
            "weight_mean": st.sampled_from([0.75, 2.0]),
            "weight_std": st.sampled_from([0.1, 2.0]),
            "weight_min": st.sampled_from([0.0, 0.9]),
            "weight_max": st.sampled_from([1.2, 3.0]),
            "content_weight": st.sampled_from([0.0, 1.0, 4.0]),
            "gate": st.sampled_from(["wrong", "correct", "all"]),
            "content_outside_gate": st.booleans(),
            "normalize_mass": st.booleans(),
        },
    ),
)
def test_random_batches_agree_with_the_plain_computation(seed: int, preset: str, options: dict) -> None:
    """Responses of any span and length side by side; each weighs the same to the bit alone, in any width."""
    draw = random.Random(seed)
    rows = []
    for _ in range(6):
        length = draw.randint(1, 40)
        bounds = sorted(draw.randint(0, length) for _ in range(4))
        span = AnswerSpan(*bounds) if bounds[0] < bounds[3] and draw.random() < 0.8 else None
        rows.append((scores_of(draw, length), span, draw.choice([-1.5, -0.25, 0.5, 0.0])))
    width = 40 + draw.choice([0, 200])
    wide = torch.tensor([scores + [NAN] * (width - len(scores)) for scores, _, _ in rows])
    mask = [[1] * len(scores) + [0] * (width - len(scores)) for scores, _, _ in rows]
    config = Grail(preset, **options)
    got = weigh(wide, [span for _, span, _ in rows], [advantage for _, _, advantage in rows], config, mask)
    assert not got.non_finite_B.any()
    for index, (scores, span, advantage) in enumerate(rows):
        plain_span = None if span is None else dataclasses.astuple(span)
        expected = reference.row_weights(scores, plain_span, advantage, reference.resolve(preset, **options))
        of_row = got.weights_BT[index, : len(scores)]
        assert of_row.tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5), index
        assert torch.equal(weigh(torch.tensor([scores]), [span], [advantage], config).weights_BT[0], of_row)
        assert not got.weights_BT[index, len(scores) :].any()


def test_token_advantages() -> None:
    advantages = torch.tensor([[-2.0, -2.0, -2.0, NAN], [0.5, 0.5, math.inf, NAN]])
    weights = torch.tensor([[0.5, 1.0, 5.0, 0.0], [1.0, 3.0, 0.0, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    got = apply_token_weights(advantages, weights, mask)
    assert got.tolist() == [[-1.0, -2.0, -10.0, 0.0], [0.5, 1.5, 0.0, 0.0]]
    assert not got.requires_grad
    assert apply_token_weights(advantages.double(), weights, mask).dtype == torch.float64
    assert apply_token_weights(advantages.bfloat16(), weights, mask.bool()).dtype == torch.bfloat16
