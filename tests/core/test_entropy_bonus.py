"""`entropy_bonus` by hand and against loops."""

from __future__ import annotations

import math

import pytest

from grail_advantage.signals.entropy_bonus import EntropyBonusConfig
from tests.core import plain_weights
from tests.core.plain_weights import Row, batch_of, close, random_rows, result_of, weights_of

ENTROPIES = [0.0, 0.5, 1.0, 2.0]


def test_by_hand() -> None:
    rows = [
        Row(1.0, (), ENTROPIES),
        Row(-1.0, (), ENTROPIES),
        Row(0.5, (), ENTROPIES),
        Row(-4.0, (), ENTROPIES),
        Row(0.0, (), ENTROPIES),
        Row(-1.0, (), [0.5]),
        Row(-1.0),
    ]
    expected = [
        [1.0, 1.2, 1.4, 1.5],
        [1.0, 0.8, 0.6, 0.5],
        [1.0, 1.4, 1.5, 1.5],
        [1.0, 0.95, 0.9, 0.8],
        [1.0] * 4,
        [0.8],
        [],
    ]
    close(weights_of(EntropyBonusConfig(), rows), expected)


def test_the_token_advantage_is_the_sum_of_the_papers_formula() -> None:
    for row, weights in zip(random_rows(2), weights_of(EntropyBonusConfig(), random_rows(2)), strict=True):
        for index in row.tokens:
            bonus = min(0.4 * row.entropies[index], abs(row.advantage) / 2) if row.advantage else 0.0
            assert weights[index] * row.advantage == pytest.approx(row.advantage + bonus, abs=1e-6)


def test_flipping_the_advantage_mirrors_the_weight_at_one() -> None:
    rows = random_rows(4)
    flipped = [Row(-row.advantage, row.log_probs, row.entropies, row.span, row.trained) for row in rows]
    both = zip(rows, weights_of(EntropyBonusConfig(), rows), weights_of(EntropyBonusConfig(), flipped), strict=True)
    for row, weights, mirrored in both:
        for index in row.tokens:
            assert weights[index] + mirrored[index] == pytest.approx(2, abs=1e-6)


def test_bounds_are_flagged() -> None:
    rows = [Row(1.0, (), ENTROPIES), Row(-1.0, (), ENTROPIES), Row(0.0, (), ENTROPIES)]
    for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
        found = result_of(EntropyBonusConfig(kappa=kappa, alpha=0.4), batch_of(rows))
        bound = [0.4 * entropy >= 1 / kappa for entropy in ENTROPIES]
        assert found.at_upper_bound_BT.tolist() == [bound, [False] * 4, [False] * 4]
        assert found.at_lower_bound_BT.tolist() == [[False] * 4, bound, [False] * 4]


def test_a_tiny_advantage_is_bounded() -> None:
    rows = [Row(1e-38, (), [0.0, 2.0]), Row(-1e-38, (), [0.0, 2.0])]
    close(weights_of(EntropyBonusConfig(kappa=4), rows), [[1, 1.25], [1, 0.75]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_entropies_leave_the_row_at_one(value: float) -> None:
    rows = [Row(1.0, (), [0.5, value]), Row(1.0, (), [0.5, 0.0])]
    close(weights_of(EntropyBonusConfig(), rows), [[1, 1], [1.2, 1]])


def test_an_entropy_that_rounds_below_zero_counts_as_zero() -> None:
    assert weights_of(EntropyBonusConfig(), [Row(1.0, (), [-0.25]), Row(-1.0, (), [-0.25])]) == [[1], [1]]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    for alpha, kappa in ((0.4, 2.0), (0.1, 1.25), (3.0, 10.0)):
        options = {"alpha": alpha, "kappa": kappa, "normalize_mass": normalize_mass}
        close(
            weights_of(EntropyBonusConfig(**options), rows, extra=seed % 3),
            plain_weights.entropy_bonus(rows, **options),
        )


def test_mass_by_hand() -> None:
    close(weights_of(EntropyBonusConfig(normalize_mass=True), [Row(1.0, (), [0.0, 1.0])]), [[2 / 2.4, 2.8 / 2.4]])


def test_options() -> None:
    config = EntropyBonusConfig()
    assert (config.alpha, config.kappa, config.normalize_mass) == (0.4, 2.0, False)
    assert (config.reads, config.ranks_entropy) == ({"entropy"}, False)
    refused = [
        ({"alpha": 0}, r"entropy_bonus\.alpha=0\.0 must be greater than 0; for equal weights"),
        ({"kappa": 1}, r"entropy_bonus\.kappa=1\.0 must be greater than 1; otherwise the bonus outweighs"),
        ({"kappa": 0.5}, r"entropy_bonus\.kappa=0\.5 must be greater than 1"),
        ({"kappa": "2"}, r"entropy_bonus\.kappa='2' must be a finite number"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            EntropyBonusConfig(**options)
    assert EntropyBonusConfig(kappa=1.01).kappa == 1.01
