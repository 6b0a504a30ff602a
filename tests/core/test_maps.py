"""The maps from scores to weights against the plain computations of `plain_maps.py`."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import maps
from grail_advantage.maps import count_of_share
from tests.core.common import MAPS as OURS
from tests.core.common import few
from tests.core.plain_maps import MAPS
from tests.core.plain_weights import close

NAN = math.nan
HARD_SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.5, 1e-12, 3e-9, 6e-5, 9e-5])  # ties abound, and what is nearly nothing
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
        [{}, {"weight_mean": 2.0, "weight_min": 1.8, "weight_max": 2.5}, {"weight_std": 2.0}]
    ),
}


def weights_of(name: str, scores: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    return maps.MAPS[name].function(scores, mask, **options).values


@pytest.mark.parametrize("name", OURS)
@few(80)
@given(data=st.data(), rows=st.lists(st.lists(SCORES, max_size=14), min_size=1, max_size=4))
def test_against_the_plain_computation(name: str, data: st.DataObject, rows: list[list[float]]) -> None:
    """Statistics are of the mask: what is beside it, in a response or after its end, may be anything."""
    options = data.draw(OPTIONS[name])
    width = max(map(len, rows)) + 3
    places = [sorted(random.Random(len(rows)).sample(range(width), len(row))) for row in rows]
    scores, mask = torch.full((len(rows), width), NAN, dtype=torch.float64), torch.zeros((len(rows), width)).bool()
    for index, (row, at) in enumerate(zip(rows, places, strict=True)):
        scores[index, at] = torch.tensor(row, dtype=torch.float64)
        mask[index, at] = True
    got = weights_of(name, scores, mask, **options)
    assert got.dtype == torch.float32
    for row, of_row, at in zip(rows, got, places, strict=True):
        # Where scores of both signs nearly cancel, their mean is no measure of them.
        if name != "mean_ratio" or abs(math.fsum(row)) > 1e-3 * math.fsum(map(abs, row)):
            close([of_row[at].tolist()], [MAPS[name](row, **options)], 1e-5)


@pytest.mark.parametrize("name", OURS)
def test_equal_scores_weigh_one_and_batches_of_nothing_have_their_shape(name: str) -> None:
    """A rounding error of 1e-6 in a mean log would show: divided by sqrt(1e-8) it moves the weight by 0.005."""
    for length in (1, 10, 4096):
        for score in (0.0, 1e-6, 0.3):
            scores = torch.full((1, length), score, dtype=torch.float64)
            weights = weights_of(name, scores, torch.ones_like(scores).bool())
            assert name == "top" or weights[0].tolist() == pytest.approx([1.0] * length, abs=1e-6)
    for shape in ((0, 4), (3, 0), (0, 0)):
        weights = weights_of(name, torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        assert weights.shape == shape


def test_a_share_that_is_a_whole_number_in_decimals_is_that_number() -> None:
    assert math.ceil(0.07 * 100) == 8  # what a product of floats makes of 7
    counts = torch.arange(0, 501)
    for hundredths in range(1, 101):
        expected = [max(1, math.ceil(Fraction(hundredths, 100) * count)) for count in range(501)]
        assert count_of_share(hundredths / 100, counts).tolist() == expected, hundredths
