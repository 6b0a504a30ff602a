"""The map `mean_ratio` by hand, against loops, and what it refuses."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grail_advantage.registry import reshapers
from grail_advantage.reshapers.mean_ratio import MeanRatio, mean_ratio_weights
from tests.core import plain_weights


def weights(scores: list[list[float]], mask: list[list[bool]] | None = None, beta: float = 0.1) -> list[list[float]]:
    scores_BT = torch.tensor(scores, dtype=torch.float64)
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(scores_BT, dtype=torch.bool)
    found = MeanRatio(beta=beta).weights(scores_BT, mask_BT, torch.ones(len(scores)))
    assert found.dtype == torch.float32
    return found.tolist()


def test_by_hand() -> None:
    # Mean 2: ratios 0.5, 0, 2.5, 1.
    plain_weights.close(weights([[1.0, 0.0, 5.0, 2.0]]), [[0.95, 0.9, 1.15, 1.0]])
    assert weights([[1.0, 0.0, 5.0, 2.0]], beta=1) == [[0.5, 0.0, 2.5, 1.0]]


def test_weights_end_at_zero() -> None:
    assert weights([[1.0, 0.0, 5.0, 2.0]], beta=2) == [[0.0, 0.0, 4.0, 1.0]]
    assert weights([[-6.0, 9.0]], beta=0.5) == [[0.0, 3.5]]  # mean 1.5: the first would weigh -1.5


def test_equal_scores_and_single_tokens_weigh_one() -> None:
    assert weights([[0.3] * 7]) == [[1.0] * 7]
    assert weights([[5.0]]) == [[1.0]]


def test_a_mean_that_is_not_above_zero() -> None:
    assert weights([[0.0, 0.0, 0.0]]) == [[1, 1, 1]]
    assert weights([[1.0, -1.0, 0.0]]) == [[1, 1, 1]]
    assert weights([[1.0, -2.0]]) == [[1, 1]]
    plain_weights.close(weights([[1e-30, 3e-30]]), [[0.95, 1.05]])


def test_statistics_come_from_the_mask() -> None:
    found = weights([[1.0, math.nan, 3.0, math.inf]], [[True, False, True, False]])[0]
    assert [found[0], found[2]] == pytest.approx([0.95, 1.05])
    assert weights([[1.0, 2.0]], [[False, False]]) == [[1, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_against_loops(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.gauss(0.5, 0.4) * 10 ** draw.randint(-3, 2) for _ in range(15)] for _ in range(8)]
    masks = [[draw.random() < 0.7 for _ in range(15)] for _ in rows]
    for beta in (0.1, 0.5, 1.0, 3.0):
        found = weights(rows, masks, beta)
        for scores, mask, of_row in zip(rows, masks, found, strict=True):
            places = [index for index in range(15) if mask[index]]
            expected = plain_weights.mean_ratio([scores[index] for index in places], beta)
            plain_weights.close([[of_row[index] for index in places]], [expected], 2e-6)


def test_mean_of_a_row_is_one_for_scores_that_are_not_negative() -> None:
    scores = torch.rand(4, 3000, generator=torch.Generator().manual_seed(0)).pow(6) * 40
    for beta in (0.1, 1.0):
        found = mean_ratio_weights(scores, torch.ones_like(scores, dtype=torch.bool), beta=beta)
        torch.testing.assert_close(found.double().mean(dim=1), torch.ones(4, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computed_in_float64(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.25, 1.0, 4.0]], dtype=dtype)
    found = mean_ratio_weights(scores, torch.ones(1, 3, dtype=torch.bool), beta=0.1)
    assert torch.equal(found, torch.tensor([plain_weights.mean_ratio([0.25, 1.0, 4.0])]))


def test_options() -> None:
    assert reshapers()["mean_ratio"] is MeanRatio
    assert (MeanRatio().beta, MeanRatio(beta=1).beta) == (0.1, 1.0)
    assert (MeanRatio.elsewhere, MeanRatio.ranks, MeanRatio.lowest) == (1.0, False, 0.0)
    with pytest.raises(ValueError, match=r"mean_ratio\.beta=0\.0 must be greater than 0; for equal weights"):
        MeanRatio(beta=0)
    with pytest.raises(ValueError, match=r"mean_ratio\.exponent is not an option; the options are beta$"):
        MeanRatio.from_dict({"exponent": 2})
