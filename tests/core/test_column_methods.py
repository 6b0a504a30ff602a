"""The methods that read old log-probabilities and entropies, and the maps from scores to weights: by hand, against loops over
random responses. That a model's columns are its own: ``test_doors.py``."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan
from grail_advantage.maps import MAPS, count_of_share
from grail_advantage.method import build
from grail_advantage.methods.policy import EntropyBonus, Stare
from tests.core import plain_weights
from tests.core.common import MAPS as OURS
from tests.core.common import few, weighed
from tests.core.plain_weights import Row, batch_of, close, random_rows, weights_of

LOW = 0.125
"""An entropy below the threshold of `stare`."""
BY_HAND = list(map(json.loads, Path(__file__).with_name("columns.jsonl").read_text(encoding="utf-8").splitlines()))
"""What the random responses below have not: advantage, log-probabilities, entropies and span of each response, and weights."""


def test_by_hand() -> None:
    for case in BY_HAND:
        rows = [Row(*columns, span and AnswerSpan(*span)) for *columns, span in case["rows"]]
        close(weights_of(build(case["method"], case["options"]), rows), case["weights"])


def test_bounds_of_the_entropy_bonus_are_flagged() -> None:
    entropies = (0.0, 0.5, 1.0, 2.0)
    rows = [Row(advantage, (), entropies) for advantage in (1.0, -1.0, 0.0)]
    for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
        w = weighed(EntropyBonus(kappa=kappa, alpha=0.4), batch_of(rows))
        bound = [0.4 * entropy >= 1 / kappa for entropy in entropies]
        assert w.high.tolist() == [bound, [False] * 4, [False] * 4]
        assert w.low.tolist() == [[False] * 4, bound, [False] * 4]


def test_stare_takes_the_mean_entropy_as_the_loss_takes_it() -> None:
    """By tokens 0.2125, by responses 0.1625."""

    def mean_of_row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        assert mask_BT.sum() == 8 and bool(values_BT.isfinite().all())
        return float(((values_BT * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1)).mean())

    rows = [Row(1.0, [-1.0], [LOW]), Row(-1.0, [-1.0] * 7, [0.225] * 7)]
    for threshold, by_tokens, by_rows in ((0.15, 1.0, 1.0), (0.2, 1.0, 1.1), (0.25, 1.1, 1.1)):
        method = Stare(threshold=threshold)
        close(weights_of(method, rows), [[by_tokens], [1] * 7])
        close(weights_of(method, rows, mean=mean_of_row_means, extra=2), [[by_rows], [1] * 7])


MAP_OPTIONS: dict[str, dict[str, list]] = {
    "top": {"k": [1, 3], "share": [None, 0.2, 0.25, 0.4, 0.7, 1.0]},
    "power": {"exponent": [0.5, 1.0, 1.5, 2.0, 3.5]},
    "mean_ratio": {"beta": [0.1, 0.5, 1.0, 3.0]},
    "bilevel": {
        "quantile": [0.0, 0.25, 0.4, 0.63, 1.0],
        "boost": [0.0, 1.0, 2.0],
        "quantile_rule": ["linear", "sorted"],
    },
    "log_zscore": {
        "weight_mean": [1.0, 2.0],
        "weight_std": [0.5, 2.0],
        "weight_min": [0.5, 0.9],
        "weight_max": [2.5, 5.0],
    },
}
ROWS_OPTIONS = {"gate": ["wrong", "correct", "all"], "statistics": ["reasoning", "response"]}
OPTIONS: dict[str, dict[str, list]] = {
    "surprisal": ROWS_OPTIONS,
    "entropy": ROWS_OPTIONS,
    "high_entropy": {"rho": [0.2, 0.05, 0.5, 1.0], "denominator": ["selected", "all"]},
    "entropy_bonus": {"alpha": [0.4, 0.1, 3.0], "kappa": [2.0, 1.25, 10.0]},
    "probability": {"alpha": [0.2, 0.3, 1.0]},
    "stare": {  # the mean entropy is about 1
        "variant": ["O1", "C2"],
        "threshold": [0.3, 1.0, 10.0],
        "share": [0.1, 0.35, 1.0],
        "strength": [0.1, 0.05, 1.0],
    },
    "polarity": {
        "right": [1.0, 0.1, 3.0],
        "wrong": [1.0, 0.0, 0.5],
        "spread": [False, True],
        "spread_over": ["both", "right", "wrong"],
    },
    "steer": {"highest": [1.2, 2.0], "lowest": [0.8, 0.0]},
}


@pytest.mark.parametrize("name", OPTIONS)
@few(60)
@given(data=st.data(), seed=st.integers(0, 10_000), extra=st.integers(0, 2), normalize_mass=st.booleans())
def test_against_loops(name: str, data: st.DataObject, seed: int, extra: int, normalize_mass: bool) -> None:
    """Responses of 0 to 14 tokens with and without answers, some with gaps, every other draw full of ties."""
    rows = random_rows(seed)
    options = data.draw(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in OPTIONS[name].items()}))
    if name != "polarity":
        options["normalize_mass"] = normalize_mass
    config, of_map = dict(options), {}
    if OPTIONS[name] is ROWS_OPTIONS:
        options["reshaper"] = data.draw(st.sampled_from(OURS))
        of_map = {key: data.draw(st.sampled_from(values)) for key, values in MAP_OPTIONS[options["reshaper"]].items()}
        of_map |= {"k": 1} if of_map.get("share") else {}
        config = options | {"reshaper_options": of_map}
    method = build(name, config)
    got = weights_of(method, rows, extra=extra)
    close(got, plain_weights.METHODS[name](rows, **options, **of_map), 1e-5)
    if name not in ("high_entropy", "stare", "steer"):
        assert got == [weights_of(method, [row])[0] for row in rows], "a response weighs the same alone"


@pytest.mark.parametrize("name", OURS)
def test_equal_scores_weigh_one_and_batches_of_nothing_have_their_shape(name: str) -> None:
    """A rounding error of 1e-6 in a mean log would show: divided by sqrt(1e-8) it moves the weight by 0.005."""
    for length in (1, 10, 32_768):
        for score in (0.0, 1e-6, 0.3):
            scores = torch.full((1, length), score, dtype=torch.float64)
            weights = MAPS[name].function(scores, torch.ones_like(scores).bool()).values
            assert name == "top" or weights[0].tolist() == pytest.approx([1.0] * length, abs=1e-6)
    for shape in ((0, 4), (3, 0), (0, 0)):
        assert MAPS[name].function(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)).values.shape == shape


def test_a_share_that_is_a_whole_number_in_decimals_is_that_number() -> None:
    assert math.ceil(0.07 * 100) == 8  # what a product of floats makes of 7
    counts = torch.arange(0, 501)
    for hundredths in range(1, 101):
        expected = [max(1, math.ceil(Fraction(hundredths, 100) * count)) for count in range(501)]
        assert count_of_share(hundredths / 100, counts).tolist() == expected, hundredths
