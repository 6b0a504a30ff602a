"""Bi-level reshaping against values worked out by hand, at its edges, and against the plain computation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grail_advantage.reshapers.bilevel import bilevel_weights
from tests.core import oar_reference

PUBLISHED = {"quantile": 0.4, "boost": 2.0}


def scores_of(*levels: float) -> torch.Tensor:
    """Scores (1, T), float64, whose ``log(1 + s)`` is as given."""
    return torch.tensor([[math.expm1(level) for level in levels]], dtype=torch.float64)


def weigh(scores: torch.Tensor, mask: torch.Tensor | None = None, **options: object) -> list[float]:
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    got = bilevel_weights(scores, mask, **(PUBLISHED | options))
    assert got.dtype == torch.float32
    return got[0].tolist()


def test_by_hand() -> None:
    # Levels 1..6, so h = 0, .2, .4, .6, .8, 1 and the 0.4-quantile, at place 2 of 0..5, is 0.4.
    got = weigh(scores_of(1, 2, 3, 4, 5, 6))
    assert got == pytest.approx([0.1, 0.5, 1.0, 1 + 2 / 3, 1 + 4 / 3, 3.0], rel=1e-6)


def test_quantile_between_two_scores() -> None:
    # h = 0, 1/3, 2/3, 1; place 0.4 * 3 = 1.2, so tau = 1/3 + 0.2 / 3 = 0.4. The index rule: floor(1.6) = 1, tau = 1/3.
    scores = scores_of(0, 3, 6, 9)
    assert weigh(scores) == pytest.approx([0.1, 1 / 3 / 0.4, 1 + 2 * (2 / 3 - 0.4) / 0.6, 3.0], rel=1e-6)
    assert weigh(scores, quantile_rule="sorted") == pytest.approx([0.1, 1.0, 2.0, 3.0], rel=1e-6)


@pytest.mark.parametrize("rule", ["linear", "sorted"])
@pytest.mark.parametrize("quantile", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("levels", [[0.0] * 5, [3.0] * 5, [2.0], [0.0]], ids=str)
def test_equal_scores_and_a_single_token_weigh_one(levels: list[float], quantile: float, rule: str) -> None:
    assert weigh(scores_of(*levels), quantile=quantile, quantile_rule=rule) == [1.0] * len(levels)


@pytest.mark.parametrize("rule", ["linear", "sorted"])
def test_quantile_zero_boosts_everything(rule: str) -> None:
    got = weigh(scores_of(0, 1, 4), quantile=0.0, quantile_rule=rule)
    assert got == pytest.approx([1.0, 1.5, 3.0], rel=1e-6)


@pytest.mark.parametrize("rule", ["linear", "sorted"])
def test_quantile_one_boosts_nothing(rule: str) -> None:
    """The index floor(1 * T) would lie behind the last score; and 1 - tau is 0."""
    got = weigh(scores_of(0, 1, 4, 4), quantile=1.0, quantile_rule=rule)
    assert got == pytest.approx([0.1, 0.25, 1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("rule", ["linear", "sorted"])
def test_ties(rule: str) -> None:
    # Three of five tie at the bottom: tau = 0, none lies below it.
    assert weigh(scores_of(0, 0, 0, 1, 2), quantile_rule=rule) == pytest.approx([1, 1, 1, 2, 3], rel=1e-6)
    # Three of five tie at the top: at the 0.8-quantile tau = 1.
    got = weigh(scores_of(0, 1, 2, 2, 2), quantile=0.8, quantile_rule=rule)
    assert got == pytest.approx([0.1, 0.5, 1, 1, 1], rel=1e-6)
    # A tie in the middle holds the quantile: all of it weighs exactly 1.
    assert weigh(scores_of(0, 2, 2, 2, 4), quantile_rule=rule)[1:4] == [1.0, 1.0, 1.0]


def test_boost_zero_only_damps() -> None:
    assert weigh(scores_of(1, 2, 3, 4, 5, 6), boost=0.0) == pytest.approx([0.1, 0.5, 1, 1, 1, 1], rel=1e-6)


def test_only_the_statistics_set_is_read_and_weighed() -> None:
    scores = torch.cat([scores_of(1, 2), torch.tensor([[math.nan, math.inf, -3.0]]), scores_of(3, 4, 5, 6)], dim=1)
    mask = torch.tensor([[True, True, False, False, False, True, True, True, True]])
    expected = [0.1, 0.5, 1.0, 1.0, 1.0, 1.0, 1 + 2 / 3, 1 + 4 / 3, 3.0]
    assert weigh(scores, mask) == pytest.approx(expected, rel=1e-6)


def test_rows_without_a_statistics_set_or_without_tokens() -> None:
    scores = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    mask = torch.tensor([[False, False], [True, True]])
    assert bilevel_weights(scores, mask, **PUBLISHED).tolist() == [[1.0, 1.0], pytest.approx([0.1, 3.0], rel=1e-6)]
    for shape in ((0, 0), (0, 3), (2, 0)):
        assert bilevel_weights(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), **PUBLISHED).shape == shape


def test_scores_as_small_as_divergences_are() -> None:
    """``1 + 1e-12`` has no room in float32."""
    assert weigh(torch.tensor([[1e-12, 2e-12, 3e-12]]), quantile=0.5) == pytest.approx([0.1, 1.0, 3.0], rel=1e-3)


def test_scores_at_or_below_minus_one_have_a_weight() -> None:
    got = weigh(torch.tensor([[-5.0, -1.0, 0.0, 1.0]]), quantile=0.5)
    assert got[0] == got[1] == pytest.approx(0.1)
    assert all(math.isfinite(weight) for weight in got)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([0.0, 1e-9, 1e-3, 0.5]) | st.floats(-0.9, 20.0).map(lambda x: round(x, 6)),
            min_size=1,
            max_size=30,
        ),
        min_size=1,
        max_size=4,
    ),
    quantile=st.sampled_from([0.0, 0.25, 0.4, 0.5, 1.0]) | st.floats(0, 1).map(lambda x: round(x, 3)),
    boost=st.sampled_from([0.0, 1.0, 2.0]),
    rule=st.sampled_from(["linear", "sorted"]),
    spare=st.integers(0, 5),
)
def test_agrees_with_the_plain_computation(
    rows: list[list[float]], quantile: float, boost: float, rule: str, spare: int
) -> None:
    width = max(map(len, rows)) + spare
    scores = torch.full((len(rows), width), math.nan, dtype=torch.float64)
    for index, row in enumerate(rows):
        scores[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
    mask = ~scores.isnan()
    got = bilevel_weights(scores, mask, quantile=quantile, boost=boost, quantile_rule=rule)
    for index, row in enumerate(rows):
        expected = oar_reference.bilevel(row, quantile, boost, rule)
        # Where tau is within rounding of a score, that score may fall on either side of it; the map is continuous there
        # unless tau is 0 itself, which both compute exactly.
        assert got[index, : len(row)].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert got[index, len(row) :].tolist() == [1.0] * (width - len(row))
        order = sorted(range(len(row)), key=lambda t: row[t])
        ranked = [float(got[index, t]) for t in order]
        assert ranked == sorted(ranked)
        assert min(ranked) >= 0.1 - 1e-7
        assert max(ranked) <= 1 + boost + 1e-6
