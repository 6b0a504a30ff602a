"""`probability` by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch

from grail_advantage import RolloutBatch
from grail_advantage.signals.probability import ProbabilityConfig
from tests.core import plain_weights
from tests.core.plain_weights import Row, close, random_rows, result_of, weights_of

HALF = math.log(0.5)


def test_by_hand() -> None:
    rows = [
        Row(1.0, [0.0, HALF, 2 * HALF, -200.0]),
        Row(-1.0, [0.0, HALF, 2 * HALF, -200.0]),
        Row(0.0, [0.0, HALF]),
        Row(1.0, [HALF]),
        Row(1.0),
    ]
    wanted = [1.0, 0.9, 0.85, 0.8]
    close(weights_of(ProbabilityConfig(), rows), [wanted, wanted, [1, 1], [0.9], []])
    close(weights_of(ProbabilityConfig(alpha=1), rows[:1]), [[1, 0.5, 0.25, 0]])
    close(weights_of(ProbabilityConfig(normalize_mass=True), [Row(1.0, [0.0, HALF])]), [[2 / 1.9, 1.8 / 1.9]])


def test_no_probability_is_above_one() -> None:
    assert weights_of(ProbabilityConfig(), [Row(1.0, [0.25, 0.0])]) == [[1, 1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_log_probabilities_leave_the_row_at_one(value: float) -> None:
    close(weights_of(ProbabilityConfig(), [Row(1.0, [HALF, value]), Row(1.0, [HALF, 0.0])]), [[1, 1], [0.9, 1]])


def test_a_narrow_column_is_not_exponentiated_in_its_own_dtype() -> None:
    column = torch.tensor([[-0.0078125, -0.5]], dtype=torch.bfloat16)  # exp of the first, 0.99222, is not in bfloat16
    batch = RolloutBatch(torch.ones(1, 2, dtype=torch.bool), torch.ones(1), [None], {"old_log_probs": column})
    expected = [[0.2 * math.exp(-0.0078125) + 0.8, 0.2 * math.exp(-0.5) + 0.8]]
    close(result_of(ProbabilityConfig(), batch).weights_BT.tolist(), expected)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    for alpha in (0.2, 0.3, 1.0):
        options = {"alpha": alpha, "normalize_mass": normalize_mass}
        close(
            weights_of(ProbabilityConfig(**options), rows, extra=seed % 3), plain_weights.probability(rows, **options)
        )


def test_the_sign_of_the_advantage_does_not_matter() -> None:
    rows = random_rows(6)
    flipped = [Row(-row.advantage, row.log_probs, row.entropies, row.span, row.trained) for row in rows]
    assert weights_of(ProbabilityConfig(), flipped) == weights_of(ProbabilityConfig(), rows)


def test_options() -> None:
    assert (ProbabilityConfig().alpha, ProbabilityConfig().normalize_mass) == (0.2, False)
    assert ProbabilityConfig().reads == {"old_log_probs"}
    for value, message in (
        (0, "must be greater than 0"),
        (1.5, "must be at most 1; the weights lie between 1 - alpha"),
    ):
        with pytest.raises(ValueError, match=rf"probability\.alpha={float(value)} {message}"):
            ProbabilityConfig(alpha=value)
