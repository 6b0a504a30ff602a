"""GRAIL's weights from given scores against the plain computation, and what a batch must be."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from grail_advantage.batch import outcome_of
from grail_advantage.weighting import BatchWeights, apply_token_weights, batch_weights
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan, Grail, RolloutBatch
from tests.core import reference
from tests.core.common import few

NAN = math.nan


def weigh(
    scores: torch.Tensor,
    spans: list[AnswerSpan | None],
    advantages: list[float],
    config: Grail,
    mask: list[list[bool]] | None = None,
) -> BatchWeights:
    mask_BT = torch.ones(scores.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
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
    """Responses of any span and length side by side, some with tokens between that do not train and have a score all the same;
    each weighs the same to the bit alone, in any width."""
    draw = random.Random(seed)
    rows = []
    for _ in range(6):
        length = draw.randint(1, 40)
        bounds = sorted(draw.randint(0, length) for _ in range(4))
        span = AnswerSpan(*bounds) if bounds[0] < bounds[3] and draw.random() < 0.8 else None
        trained = [draw.random() > 0.2 * (seed % 2) for _ in range(length)]
        rows.append((scores_of(draw, length), span, draw.choice([-1.5, -0.25, 0.5, 0.0]), trained))
    width = 40 + draw.choice([0, 200])
    wide = torch.tensor([scores + [NAN] * (width - len(scores)) for scores, *_ in rows])
    mask = [trained + [False] * (width - len(trained)) for *_, trained in rows]
    config = Grail(preset, **options)
    got = weigh(wide, [row[1] for row in rows], [row[2] for row in rows], config, mask)
    assert not got.non_finite_B.any()
    for index, (scores, span, advantage, trained) in enumerate(rows):
        plain_span = None if span is None else tuple(sum(trained[:bound]) for bound in dataclasses.astuple(span))
        kept = [score for score, trains in zip(scores, trained, strict=True) if trains]
        expected = reference.row_weights(kept, plain_span, advantage, reference.resolve(preset, **options))
        of_row = got.weights_BT[index, : len(scores)]
        assert of_row[torch.tensor(trained)].tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5), index
        alone = weigh(torch.tensor([scores]), [span], [advantage], config, [trained])
        assert torch.equal(alone.weights_BT[0], of_row)
    assert not got.weights_BT[~torch.tensor(mask)].any()
    if not config.normalize_mass and config.reshaper == "log_zscore":
        for flagged_BT, bound in (
            (got.at_lower_bound_BT, config.weight_min),
            (got.at_upper_bound_BT, config.weight_max),
        ):
            assert torch.equal(flagged_BT, got.from_scores_BT & (got.weights_BT == torch.tensor(bound)))


def test_token_advantages() -> None:
    advantages = torch.tensor([[-2.0, -2.0, -2.0, NAN], [0.5, 0.5, math.inf, NAN]])
    weights = torch.tensor([[0.5, 1.0, 5.0, 0.0], [1.0, 3.0, 0.0, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    got = apply_token_weights(advantages, weights, mask)
    assert got.tolist() == [[-1.0, -2.0, -10.0, 0.0], [0.5, 1.5, 0.0, 0.0]]
    assert not got.requires_grad
    assert apply_token_weights(advantages.double(), weights, mask).dtype == torch.float64
    assert apply_token_weights(advantages.bfloat16(), weights, mask.bool()).dtype == torch.bfloat16
