"""`high_entropy` by hand and against loops: one cut for the whole batch."""

from __future__ import annotations

import math
import random

import pytest

from grail_advantage.signals.high_entropy import HighEntropyConfig
from tests.core import plain_weights
from tests.core.plain_weights import Row, batch_of, close, random_rows, result_of, weights_of

KEPT = HighEntropyConfig(denominator="all")


def test_by_hand() -> None:
    # Ten tokens, two of them kept; the row of the highest has advantage 0, another has no token kept.
    rows = [Row(0.0, (), [9.0, 1.0, 2.0]), Row(-1.0, (), [3.0, 8.0, 4.0, 5.0]), Row(1.0, (), [6.0, 7.0, 0.0])]
    kept = [[1, 0, 0], [0, 1, 0, 0], [0, 0, 0]]
    assert weights_of(KEPT, rows) == kept
    assert weights_of(HighEntropyConfig(), rows) == [[5 * weight for weight in row] for row in kept]


def test_the_number_kept_is_rounded_up() -> None:
    falling = [Row(1.0, (), [float(20 - index) for index in range(20)])]
    for rho, kept in ((0.2, 4), (0.21, 5), (0.01, 1), (0.5, 10), (1.0, 20)):
        assert weights_of(HighEntropyConfig(rho=rho, denominator="all"), falling) == [
            [1.0] * kept + [0.0] * (20 - kept)
        ]
        close(weights_of(HighEntropyConfig(rho=rho), falling), [[20 / kept] * kept + [0.0] * (20 - kept)])


def test_ties_at_the_cut_are_kept_and_counted() -> None:
    rows = [Row(1.0, (), [2.0, 1.0, 1.0]), Row(-1.0, (), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])]
    assert weights_of(KEPT, rows) == [[1, 1, 1], [1, 0, 0, 0, 0, 0, 0]]  # two of ten, and two more that tie
    close(weights_of(HighEntropyConfig(), rows), [[2.5] * 3, [2.5, 0, 0, 0, 0, 0, 0]])


def test_equal_entropies_all_weigh_one() -> None:
    rows = [Row(1.0, (), [0.5] * 3), Row(-1.0, (), [0.5]), Row(1.0)]
    for denominator in ("selected", "all"):
        assert weights_of(HighEntropyConfig(denominator=denominator), rows) == [[1, 1, 1], [1], []]


def test_a_batch_of_one_token_and_one_without_any() -> None:
    assert weights_of(HighEntropyConfig(), [Row(1.0, (), [0.0])]) == [[1]]
    assert weights_of(HighEntropyConfig(), [Row(1.0), Row(-1.0)]) == [[], []]


def test_mean_weight_is_one_where_the_kept_tokens_are_the_denominator() -> None:
    for seed in range(10):
        found = [weight for row in weights_of(HighEntropyConfig(), random_rows(seed)) for weight in row]
        tokens = sum(len(row.tokens) for row in random_rows(seed))
        assert math.fsum(found) == pytest.approx(tokens, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_non_finite_entropy_weighs_one_and_counts_nowhere(value: float) -> None:
    broken = Row(1.0, (), [value, 50.0, 60.0, 70.0, 80.0])
    sound = Row(-1.0, (), [4.0, 1.0, 2.0, 3.0, 0.0])
    assert weights_of(HighEntropyConfig(), [broken, sound]) == [[1] * 5, [5, 0, 0, 0, 0]]
    assert result_of(HighEntropyConfig(), batch_of([broken, sound])).non_finite_B.tolist() == [True, False]
    assert weights_of(HighEntropyConfig(), [broken]) == [[1] * 5]


def test_neither_advantages_nor_answers_nor_log_probabilities_matter() -> None:
    rows = random_rows(3)
    bare = [Row(-row.advantage, [math.nan] * len(row.entropies), row.entropies, None, row.trained) for row in rows]
    assert weights_of(HighEntropyConfig(), bare) == weights_of(HighEntropyConfig(), rows)


def test_rows_may_come_in_any_order_but_not_in_parts() -> None:
    rows = random_rows(7)
    found = weights_of(HighEntropyConfig(), rows)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    assert weights_of(HighEntropyConfig(), [rows[place] for place in order]) == [found[place] for place in order]
    # Each half has a cut of its own: in the second one, far below the first, tokens are kept that the whole would drop.
    high, low = Row(1.0, (), [9.0, 8.0, 7.0, 6.0, 5.0]), Row(1.0, (), [0.5, 0.4, 0.3, 0.2, 0.1])
    assert weights_of(KEPT, [high, low]) == [[1, 1, 0, 0, 0], [0] * 5]
    assert weights_of(KEPT, [high]) + weights_of(KEPT, [low]) == [[1, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    for rho in (0.2, 0.05, 0.5, 1.0):
        for denominator in ("selected", "all"):
            options = {"rho": rho, "denominator": denominator, "normalize_mass": normalize_mass}
            close(
                weights_of(HighEntropyConfig(**options), rows, extra=seed % 3),
                plain_weights.high_entropy(rows, **options),
            )


def test_mass_by_hand() -> None:
    # A row without any token kept stays at 0.
    rows = [Row(0.0, (), [9.0, 1.0, 2.0]), Row(-1.0, (), [3.0, 8.0, 4.0, 5.0]), Row(1.0, (), [6.0, 7.0, 0.0])]
    for denominator in ("selected", "all"):
        config = HighEntropyConfig(denominator=denominator, normalize_mass=True)
        assert weights_of(config, rows) == [[3, 0, 0], [0, 4, 0, 0], [0, 0, 0]]


def test_options() -> None:
    config = HighEntropyConfig()
    assert (config.rho, config.denominator, config.normalize_mass) == (0.2, "selected", False)
    assert config.ranks_entropy
    assert config.reads == {"entropy"}
    refused = [
        ({"rho": 0}, r"high_entropy\.rho=0\.0 must be greater than 0"),
        ({"rho": 1.01}, r"high_entropy\.rho=1\.01 must be at most 1"),
        ({"denominator": "kept"}, r"high_entropy\.denominator='kept' is unknown; choose one of selected, all"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            HighEntropyConfig(**options)
