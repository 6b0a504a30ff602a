"""The maps from scores to weights: by hand, and against the plain computations of `plain_maps.py`."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage.registry import reshapers
from grail_advantage.reshapers.bilevel import Bilevel
from grail_advantage.reshapers.log_zscore import log_zscore
from grail_advantage.reshapers.top import count_of_share
from tests.core.common import RESHAPERS, few
from tests.core.plain_maps import MAPS
from tests.core.plain_weights import close

NAN, INF = math.nan, math.inf
HARD_SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.5, 1e-12, 3e-9])  # so that ties abound
SCORES = HARD_SCORES | st.floats(0, 20).map(lambda value: round(value, 6)) | st.floats(-3, 0)
OPTIONS: dict[str, Any] = {
    "top": st.sampled_from([{"k": 1}, {"k": 3}, {"share": 0.25}, {"share": 0.7}, {"share": 1.0}]),
    "power": st.sampled_from([{"exponent": value} for value in (0.5, 1.0, 2.0, 3.5)]),
    "mean_ratio": st.sampled_from([{"beta": value} for value in (0.1, 0.5, 1.0, 3.0)]),
    "bilevel": st.fixed_dictionaries(
        {
            "quantile": st.sampled_from([0.0, 0.25, 0.4, 1.0]) | st.floats(0, 1).map(lambda value: round(value, 3)),
            "boost": st.sampled_from([0.0, 1.0, 2.0]),
            "quantile_rule": st.sampled_from(["linear", "sorted"]),
        }
    ),
    "log_zscore": st.sampled_from(
        [{}, {"weight_mean": 2.0, "weight_std": 0.1, "weight_min": 1.8, "weight_max": 2.5}, {"weight_std": 2.0}]
    ),
}


def weigh(name: str, scores: list[list[float]], mask: list[list[bool]] | None = None, **options: Any) -> list:
    """Weights of rows of equal length, all of whose tokens are in the statistics set unless a mask says which."""
    scores_BT = torch.tensor(scores, dtype=torch.float64)
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(scores_BT, dtype=torch.bool)
    found = reshapers()[name](**options).weights(scores_BT, mask_BT, torch.ones(len(scores)))
    assert found.dtype == torch.float32
    return found.tolist()


def one(name: str, *scores: float, **options: Any) -> list[float]:
    return weigh(name, [list(scores)], **options)[0]


def by_level(*levels: float) -> list[float]:
    """Scores whose ``log(1 + s)`` is as given."""
    return [math.expm1(level) for level in levels]


class TestEveryMap:
    def test_each_has_a_plain_computation(self) -> None:
        assert set(RESHAPERS) == set(MAPS) == set(OPTIONS)

    @pytest.mark.parametrize("name", MAPS)
    @few(80)
    @given(data=st.data(), rows=st.lists(st.lists(SCORES, max_size=14), min_size=1, max_size=4))
    def test_against_the_plain_computation(self, name: str, data: st.DataObject, rows: list[list[float]]) -> None:
        """Statistics are of the mask: what stands beside it, in a row or behind its end, may be anything."""
        options = data.draw(OPTIONS[name])
        shuffled = random.Random(len(rows))
        width = max(map(len, rows)) + 3
        places = [sorted(shuffled.sample(range(width), len(row))) for row in rows]
        scores_BT = torch.full((len(rows), width), NAN, dtype=torch.float64)
        mask_BT = torch.zeros((len(rows), width), dtype=torch.bool)
        for index, (row, at) in enumerate(zip(rows, places, strict=True)):
            scores_BT[index, at] = torch.tensor(row, dtype=torch.float64)
            mask_BT[index, at] = True
        got = reshapers()[name](**options).weights(scores_BT, mask_BT, torch.ones(len(rows)))
        # Where scores of both signs nearly cancel, their mean is no measure of them.
        sound = [name != "mean_ratio" or abs(math.fsum(row)) > 1e-3 * math.fsum(map(abs, row)) for row in rows]
        of_rows = [got[index, at].tolist() for index, at in enumerate(places)]
        expected = [MAPS[name](row, **options) for row in rows]
        close(*([row for row, usable in zip(each, sound, strict=True) if usable] for each in (of_rows, expected)), 1e-5)

    @pytest.mark.parametrize("name", MAPS)
    def test_a_row_weighs_the_same_to_the_bit_in_any_width(self, name: str) -> None:
        generator = torch.Generator().manual_seed(3)
        scores = torch.exp(2 * torch.randn(8, 300, generator=generator))
        lengths = torch.randint(1, 300, (8, 1), generator=generator)
        mask = torch.arange(300) < lengths
        chosen = reshapers()[name]()
        together = chosen.weights(scores, mask, torch.ones(8))
        for row, length in enumerate(lengths[:, 0].tolist()):
            alone = chosen.weights(scores[row : row + 1, :length], mask[row : row + 1, :length], torch.ones(1))
            assert torch.equal(alone[0], together[row, :length]), row

    @pytest.mark.parametrize("name", MAPS)
    def test_equal_scores_weigh_one_and_batches_of_nothing_have_their_shape(self, name: str) -> None:
        """A rounding error of 1e-6 in a mean log would show: divided by sqrt(1e-8) it moves the weight by 0.005."""
        chosen = reshapers()[name]()
        for length in (1, 10, 4096):
            for score in (0.0, 1e-6, 0.3):
                weights = one(name, *[score] * length)
                assert name == "top" or weights == pytest.approx([1.0] * length, abs=1e-6)
        for shape in ((0, 4), (3, 0), (0, 0)):
            found = chosen.weights(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape[0]))
            assert found.shape == shape


class TestTop:
    def test_exactly_k_of_equal_scores_the_earlier_ones(self) -> None:
        assert one("top", 1.0, 2.0, 2.0, 2.0, 0.0, k=2) == [0, 1, 1, 0, 0]
        assert one("top", *[1.0] * 5000, k=100) == [1.0] * 100 + [0.0] * 4900
        assert one("top", -0.0, 0.0, -0.0) == one("top", 0.0, -0.0, 0.0) == [1, 0, 0]

    def test_a_share_that_is_a_whole_number_in_decimals_is_that_number(self) -> None:
        assert math.ceil(0.07 * 100) == 8  # what a product of floats makes of 7
        counts = torch.arange(0, 501)
        for hundredths in range(1, 101):
            expected = [max(1, math.ceil(Fraction(hundredths, 100) * count)) for count in range(501)]
            assert count_of_share(hundredths / 100, counts).tolist() == expected, hundredths


class TestPower:
    def test_a_row_whose_powers_sum_to_almost_nothing_is_even(self) -> None:
        # 2 * (6e-5)^2 = 7.2e-9 is below 1e-8, 6e-5^2 + 9e-5^2 = 1.17e-8 is not.
        assert one("power", 6e-5, 6e-5, 0.0) == [1, 1, 1]
        assert one("power", 6e-5, 9e-5, 0.0) == pytest.approx([3 * 36 / 117, 3 * 81 / 117, 0])
        # The threshold is on the sum of the powers: with exponent 1 the same scores are far above it.
        assert one("power", 6e-5, 3e-5, exponent=1) == pytest.approx([4 / 3, 2 / 3])


class TestBilevel:
    def test_by_hand(self) -> None:
        # Levels 1..6, so h = 0, .2, .4, .6, .8, 1 and the 0.4-quantile, at place 2 of 0..5, is 0.4.
        scores = by_level(1, 2, 3, 4, 5, 6)
        assert one("bilevel", *scores) == pytest.approx([0.1, 0.5, 1.0, 1 + 2 / 3, 1 + 4 / 3, 3.0], rel=1e-6)
        assert one("bilevel", *scores, boost=0.0) == pytest.approx([0.1, 0.5, 1, 1, 1, 1], rel=1e-6)
        assert (Bilevel().quantile, Bilevel().boost, Bilevel().quantile_rule) == (0.4, 2.0, "linear")


def by_log(*log_scores: float) -> torch.Tensor:
    """Scores (1, T), float64, whose ``log(s + 1e-8)`` is as given."""
    return torch.tensor([[math.exp(value) - 1e-8 for value in log_scores]], dtype=torch.float64)


def z_of(scores_BT: torch.Tensor, mask: list[list[bool]] | None = None) -> list[float]:
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(scores_BT, dtype=torch.bool)
    return log_zscore(scores_BT, mask_BT)[0].tolist()


class TestLogZscore:
    def test_statistics_come_from_the_mask_and_every_token_is_scored(self) -> None:
        # Over the first two tokens: mean 0, variance 1.
        assert z_of(by_log(-1, 1, 3, -5), [[True, True, False, False]]) == pytest.approx([-1, 1, 3, -5], rel=1e-5)
        assert z_of(torch.tensor([[0.1, 0.2]]), [[False, False]]) == [0.0, 0.0]

    def test_both_epsilons(self) -> None:
        # Score 0 has log 1e-8 and score 3e-8 has log 4e-8, so their distance is log 4 and the other two lie in between.
        got = z_of(torch.tensor([[0.0, 1e-8, 3e-8, 1e-8]], dtype=torch.float64))
        assert got == pytest.approx([-(2**0.5), 0, 2**0.5, 0], abs=1e-4)
        # A single token in the statistics: std is sqrt(1e-8) = 1e-4, so z of the other is its log distance times 1e4.
        assert z_of(torch.tensor([[0.0, 1.0]]), [[True, False]]) == pytest.approx([0.0, 18.420681 * 1e4], rel=1e-4)
        # Logs +-1e-4: variance 1e-8, std sqrt(2e-8). Outside the root the epsilon would leave z = +-1.
        assert z_of(by_log(-1e-4, 1e-4)) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)

    def test_weights_are_scaled_and_clipped_at_both_bounds(self) -> None:
        # Logs with mean 0 and variance 1 over four tokens; the others lie at z = -1.5, -3, 7.9 and 16.
        scores, mask = by_log(-1, 1, -1, 1, -1.5, -3, 7.9, 16).tolist(), [[True] * 4 + [False] * 4]
        expected = [0.5, 1.5, 0.5, 1.5, 0.5, 0.5, 4.95, 5.0]
        assert weigh("log_zscore", scores, mask)[0] == pytest.approx(expected, rel=1e-5)
        other = {"weight_mean": 2.0, "weight_std": 0.1, "weight_min": 1.8, "weight_max": 2.5}
        expected = [1.9, 2.1, 1.9, 2.1, 1.85, 1.8, 2.5, 2.5]
        assert weigh("log_zscore", scores, mask, **other)[0] == pytest.approx(expected, rel=1e-5)
