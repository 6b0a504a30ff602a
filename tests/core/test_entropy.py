"""`entropy` by hand and against loops."""

from __future__ import annotations

import math

import pytest

from grail_advantage import AnswerSpan
from grail_advantage.signals.entropy import EntropyConfig
from tests.core import plain_weights
from tests.core.plain_weights import SPAN, Row, close, random_rows, weights_of

ENTROPIES = [1.0, 0.0, 5.0, 2.0]


def test_by_hand() -> None:
    # Mean 2: ratios 0.5, 0, 2.5 and 1. With or without an answer, and whatever the sign.
    wanted = [0.95, 0.9, 1.15, 1.0]
    rows = [
        Row(-1.0, (), ENTROPIES),
        Row(0.5, (), ENTROPIES, AnswerSpan(2, 2, 3, 4)),
        Row(0.0, (), ENTROPIES),
        Row(1.0, (), [0.7]),
        Row(1.0, (), [0.25] * 3),
        Row(1.0, (), [0.0] * 3),
        Row(1.0),
    ]
    expected = [wanted, wanted, [1] * 4, [1], [1] * 3, [1] * 3, []]
    close(weights_of(EntropyConfig(), rows), expected)


def test_options_by_hand() -> None:
    row = Row(-1.0, (), [1.0, 0.0, 5.0, 2.0, 9.0, 9.0, 9.0], SPAN)
    options = {"statistics": "reasoning", "reshaper_options": {"beta": 0.5}}
    close(weights_of(EntropyConfig(**options), [row]), [[0.75, 0.5, 1.75, 1, 1, 1, 1]])
    top = EntropyConfig(reshaper="top", statistics="reasoning")
    assert weights_of(top, [row]) == [[0, 0, 1, 0, 0, 0, 0]]
    right = Row(1.0, (), ENTROPIES)
    assert weights_of(EntropyConfig(gate="wrong"), [right]) == [[1] * 4]
    close(weights_of(EntropyConfig(reshaper="power", normalize_mass=True), [right]), [[4 / 30, 0, 100 / 30, 16 / 30]])


def test_an_entropy_that_rounds_below_zero_counts_as_zero() -> None:
    assert weights_of(EntropyConfig(), [Row(1.0, (), [-0.25, 0.0])]) == [[1, 1]]
    close(weights_of(EntropyConfig(), [Row(1.0, (), [-0.25, 1.0])]), [[0.9, 1.1]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_entropies_leave_the_row_at_one(value: float) -> None:
    rows = [Row(1.0, (), [1.0, value]), Row(1.0, (), [1.0, 3.0])]
    close(weights_of(EntropyConfig(), rows), [[1, 1], [0.95, 1.05]])
    # Behind the statistics set nobody reads it.
    rows = [Row(1.0, (), [1.0, 3.0, value], AnswerSpan(2, 2, 2, 3))]
    close(weights_of(EntropyConfig(statistics="reasoning"), rows), [[0.95, 1.05, 1]])


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    maps = [("mean_ratio", {}), ("mean_ratio", {"beta": 2.0}), ("top", {"share": 0.2}), ("power", {})]
    for reshaper, options in maps:
        for gate, statistics in (("all", "response"), ("wrong", "reasoning")):
            chosen = {"reshaper": reshaper, "gate": gate, "statistics": statistics, "normalize_mass": normalize_mass}
            config = EntropyConfig(**chosen, reshaper_options=options)
            close(weights_of(config, rows, extra=seed % 3), plain_weights.entropy(rows, **chosen, **options))


def test_the_default_keeps_the_mass_of_every_row() -> None:
    for row, weights in zip(random_rows(5), weights_of(EntropyConfig(), random_rows(5)), strict=True):
        assert math.fsum(weights) == pytest.approx(len(row.tokens))


def test_whether_it_ranks_follows_from_the_map() -> None:
    ranks = {"top": True, "bilevel": True, "power": False, "mean_ratio": False, "log_zscore": False}
    assert {name: EntropyConfig(reshaper=name).ranks_entropy for name in ranks} == ranks
    assert not EntropyConfig().ranks_entropy


def test_options() -> None:
    config = EntropyConfig()
    assert (config.reshaper, config.gate, config.statistics, config.normalize_mass) == (
        "mean_ratio",
        "all",
        "response",
        False,
    )
    assert config.reads == {"entropy"}
    with pytest.raises(ValueError, match=r"entropy\.reshaper_options: mean_ratio\.beta=-1\.0 must be greater than 0"):
        EntropyConfig(reshaper_options={"beta": -1})
