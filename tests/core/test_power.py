"""The map `power` by hand, against loops, and what it refuses."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grail_advantage.registry import reshapers
from grail_advantage.reshapers.power import Power, power_weights
from tests.core import plain_weights


def weights(
    scores: list[list[float]], mask: list[list[bool]] | None = None, exponent: float = 2.0
) -> list[list[float]]:
    scores_BT = torch.tensor(scores, dtype=torch.float64)
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(scores_BT, dtype=torch.bool)
    found = Power(exponent=exponent).weights(scores_BT, mask_BT, torch.ones(len(scores)))
    assert found.dtype == torch.float32
    return found.tolist()


def test_by_hand() -> None:
    plain_weights.close(weights([[1.0, 2.0, 0.0, 1.0]]), [[4 / 6, 16 / 6, 0, 4 / 6]])
    assert weights([[1.0, 3.0]], exponent=1) == [[0.5, 1.5]]
    plain_weights.close(weights([[4.0, 9.0]], exponent=0.5), [[0.8, 1.2]])


def test_equal_scores_and_single_tokens_weigh_one() -> None:
    assert weights([[0.3] * 7]) == [[1.0] * 7]
    assert weights([[5.0]]) == [[1.0]]


def test_negative_scores_count_as_zero() -> None:
    assert weights([[-3.0, 1.0, -1.0]]) == [[0, 3, 0]]
    assert weights([[-3.0, -1.0]]) == [[1, 1]]


def test_a_row_whose_powers_sum_to_almost_nothing_is_even() -> None:
    # 2 * (6e-5)^2 = 7.2e-9 is below 1e-8, 6e-5^2 + 9e-5^2 = 1.17e-8 is not.
    assert weights([[6e-5, 6e-5, 0.0]]) == [[1, 1, 1]]
    plain_weights.close(weights([[6e-5, 9e-5, 0.0]]), [[3 * 36 / 117, 3 * 81 / 117, 0]])
    assert weights([[0.0, 0.0]]) == [[1, 1]]
    # The threshold is on the sum of the powers: with exponent 1 the same scores are far above it.
    plain_weights.close(weights([[6e-5, 3e-5]], exponent=1), [[4 / 3, 2 / 3]])


def test_huge_powers_stay_finite() -> None:
    plain_weights.close(weights([[1e30, 2e30]], exponent=20), [[2 / (1 + 2**20), 2 * 2**20 / (1 + 2**20)]])


def test_statistics_come_from_the_mask() -> None:
    found = weights([[1.0, math.nan, 3.0, math.inf]], [[True, False, True, False]])[0]
    assert [found[0], found[2]] == pytest.approx([0.2, 1.8])
    assert weights([[1.0, 2.0]], [[False, False]]) == [[1, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_against_loops(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.gauss(0.5, 1) * 10 ** draw.randint(-3, 2) for _ in range(15)] for _ in range(8)]
    masks = [[draw.random() < 0.7 for _ in range(15)] for _ in rows]
    for exponent in (0.5, 1.0, 2.0, 3.5):
        found = weights(rows, masks, exponent)
        for scores, mask, of_row in zip(rows, masks, found, strict=True):
            places = [index for index in range(15) if mask[index]]
            expected = plain_weights.power([scores[index] for index in places], exponent)
            plain_weights.close([[of_row[index] for index in places]], [expected])


def test_mean_of_a_row_is_one() -> None:
    scores = torch.rand(4, 3000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-2], [1], [30], [1e4]])
    found = power_weights(scores, torch.ones_like(scores, dtype=torch.bool), exponent=2)
    torch.testing.assert_close(found.double().mean(dim=1), torch.ones(4, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computed_in_float64(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.25, 1.0, 4.0]], dtype=dtype)
    found = power_weights(scores, torch.ones(1, 3, dtype=torch.bool), exponent=3)
    expected = torch.tensor([plain_weights.power([0.25, 1.0, 4.0], 3)])
    assert torch.equal(found, expected)


def test_options() -> None:
    assert reshapers()["power"] is Power
    assert (Power().exponent, Power(exponent=3).exponent) == (2.0, 3.0)
    assert (Power.elsewhere, Power.ranks) == (1.0, False)
    for value in (0, -1):
        with pytest.raises(ValueError, match=r"power\.exponent=.* must be greater than 0; for equal weights"):
            Power(exponent=value)
    with pytest.raises(ValueError, match=r"power\.g is not an option; the options are exponent$"):
        Power.from_dict({"g": 2})
