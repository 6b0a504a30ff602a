"""`stare` by hand and against loops: its gate, its choice over the whole batch, and both variants."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grail_advantage.signals.stare import StareConfig
from tests.core import plain_weights
from tests.core.plain_weights import Row, batch_of, close, random_rows, result_of, weights_of

LOW = 0.125
"""An entropy below the threshold."""


def low(advantage: float, *surprisals: float) -> Row:
    return Row(advantage, [-value for value in surprisals], [LOW] * len(surprisals))


ROWS = [
    low(1.0, 1, 2, 9, 4),
    low(0.5, 5, 6, 8, 7),
    low(-1.0, 30, 10, 20),
    low(0.0, 99, 99),
    low(2.0, 3, 3, 3),
    low(1.0),
]
"""Eleven tokens with a positive advantage, three with a negative one."""


def test_by_hand() -> None:
    # A tenth of eleven is two, of three one.
    expected = [[1, 1, 1.1, 1], [1, 1, 1.1, 1], [1, 1, 1], [1, 1], [1, 1, 1], []]
    close(weights_of(StareConfig(), ROWS), expected)
    expected[2] = [0.9, 1, 1]
    close(weights_of(StareConfig(variant="C2"), ROWS), expected)
    close(
        weights_of(StareConfig(variant="C2", share=0.5, strength=0.05), ROWS[1:3]),
        [[1, 1, 1.05, 1.05], [0.95, 1, 0.95]],
    )


def test_at_least_one_token_and_no_more_than_there_are() -> None:
    config = StareConfig(variant="C2")
    close(weights_of(config, [low(1.0, 2), low(-1.0, 2)]), [[1.1], [0.9]])
    close(weights_of(config, [low(1.0, 2, 1)]), [[1.1, 1]])
    close(weights_of(config, [low(-1.0, 2, 1)]), [[0.9, 1]])
    close(weights_of(StareConfig(share=1), [low(1.0, 2, 1)]), [[1.1, 1.1]])
    assert weights_of(config, [low(0.0, 2, 1), low(0.0)]) == [[1, 1], []]


def test_exactly_as_many_of_equal_tokens_the_earlier_ones_of_earlier_rows() -> None:
    rows = [low(1.0, *[2] * 7), low(1.0, *[2] * 8)]
    close(weights_of(StareConfig(), rows), [[1.1, 1.1, *[1] * 5], [1] * 8])
    rows = [low(1.0, *[1] * 7), low(-1.0, 2, 2), low(1.0, *[2] * 8), low(1.0, 2, 3)]  # two of 17: the 3 and the first 2
    close(weights_of(StareConfig(), rows), [[1] * 7, [1, 1], [1.1, *[1] * 7], [1, 1.1]])


@pytest.mark.parametrize(("entropy", "on"), [(0.25, True), (0.5, False), (0.75, False)])
def test_gate(entropy: float, on: bool) -> None:
    rows = [Row(1.0, [-1.0], [entropy])]
    close(weights_of(StareConfig(threshold=0.5), rows), [[1.1 if on else 1.0]])


def test_the_mean_entropy_is_that_of_all_rows() -> None:
    # The tokens of the row without advantage bring the mean to (0.125 + 3 * 0.25) / 4 = 0.21875.
    rows = [Row(1.0, [-1.0], [LOW]), Row(0.0, [-1.0] * 3, [0.25] * 3)]
    close(weights_of(StareConfig(threshold=0.2), rows), [[1.0], [1] * 3])
    close(weights_of(StareConfig(threshold=0.2), rows[:1]), [[1.1]])
    close(weights_of(StareConfig(threshold=0.22), rows), [[1.1], [1] * 3])


def test_the_mean_is_taken_as_the_loss_takes_it() -> None:
    seen = []

    def mean_of_row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        seen.append((values_BT, mask_BT))
        counts_B = mask_BT.sum(dim=-1)
        means_B = (values_BT * mask_BT).sum(dim=-1) / counts_B.clamp(min=1)  # a NaN in the padding would get through
        return float(means_B[counts_B > 0].mean())

    # By tokens 0.2125, by rows 0.1625.
    rows = [Row(1.0, [-1.0], [LOW]), Row(-1.0, [-1.0] * 7, [0.225] * 7)]
    for threshold, by_tokens, by_rows in ((0.15, 1.0, 1.0), (0.2, 1.0, 1.1), (0.25, 1.1, 1.1)):
        config = StareConfig(threshold=threshold)
        close(weights_of(config, rows), [[by_tokens], [1] * 7])
        close(weights_of(config, rows, aggregate=mean_of_row_means, extra=2), [[by_rows], [1] * 7])
    for values_BT, mask_BT in seen:
        assert mask_BT.sum() == 8
        assert bool(torch.isfinite(values_BT).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["log_probs", "entropies"])
def test_a_row_with_a_non_finite_value_weighs_one_and_counts_nowhere(column: str, value: float) -> None:
    broken = Row(1.0, [-9.0] * 20, [5.0] * 20)
    getattr(broken, column)[3] = value
    sound = low(1.0, 1, 2)
    close(weights_of(StareConfig(), [broken, sound]), [[1] * 20, [1, 1.1]])
    assert result_of(StareConfig(), batch_of([broken, sound])).non_finite_B.tolist() == [True, False]
    assert weights_of(StareConfig(), [broken]) == [[1] * 20]


def test_flipping_all_advantages_swaps_the_roles() -> None:
    rows = [low(1.0, 1, 9, 3), low(-2.0, 4, 2, 8)]
    flipped = [low(-1.0, 1, 9, 3), low(2.0, 4, 2, 8)]
    found, mirrored = (weights_of(StareConfig(variant="C2"), batch) for batch in (rows, flipped))
    close(found, [[1, 1.1, 1], [1, 1, 0.9]])
    close(mirrored, [[2 - weight for weight in row] for row in found])


def test_rows_may_come_in_any_order_but_not_in_parts() -> None:
    order = list(range(len(ROWS)))
    random.Random(1).shuffle(order)
    found = weights_of(StareConfig(variant="C2"), ROWS)
    assert weights_of(StareConfig(variant="C2"), [ROWS[place] for place in order]) == [found[place] for place in order]
    # Alone each row has a tenth of its own.
    close(weights_of(StareConfig(), ROWS[:1]) + weights_of(StareConfig(), ROWS[4:5]), [[1, 1, 1.1, 1], [1.1, 1, 1]])


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    for variant in ("O1", "C2"):
        for share, strength in ((0.1, 0.1), (0.35, 0.05), (1.0, 1.0)):
            for threshold in (0.3, 1.0, 10.0):  # the mean is about 1
                options = {
                    "variant": variant,
                    "share": share,
                    "strength": strength,
                    "threshold": threshold,
                    "normalize_mass": normalize_mass,
                }
                close(weights_of(StareConfig(**options), rows, extra=seed % 3), plain_weights.stare(rows, **options))


def test_options() -> None:
    config = StareConfig()
    assert (config.variant, config.threshold, config.share, config.strength) == ("O1", 0.3, 0.1, 0.1)
    assert config.reads == {"old_log_probs", "entropy"}
    refused = [
        ({"variant": "adaptive"}, r"stare\.variant='adaptive' is unknown; choose one of O1, C2"),
        ({"threshold": 0}, r"stare\.threshold=0\.0 must be greater than 0; no entropy is below it"),
        ({"share": 0}, r"stare\.share=0\.0 must be greater than 0"),
        ({"share": 2}, r"stare\.share=2\.0 must be at most 1"),
        ({"strength": 1.5}, r"stare\.strength=1\.5 must be at most 1; the weights are 1 - strength"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            StareConfig(**options)
