"""The methods that read old log-probabilities and entropies, by hand. Loops are in `test_policy_columns.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grail_advantage import AnswerSpan, Signal
from grail_advantage.signals.a3po import A3poConfig as A3po
from grail_advantage.signals.entropy import EntropyConfig as Entropy
from grail_advantage.signals.entropy_bonus import EntropyBonusConfig as EntropyBonus
from grail_advantage.signals.high_entropy import HighEntropyConfig as HighEntropy
from grail_advantage.signals.polarity import PolarityConfig as Polarity
from grail_advantage.signals.probability import ProbabilityConfig as Probability
from grail_advantage.signals.stare import StareConfig as Stare
from grail_advantage.signals.steer import SteerConfig as Steer
from grail_advantage.signals.surprisal import SurprisalConfig as Surprisal
from tests.core.plain_weights import SPAN, Row, batch_of, close, random_rows, result_of, weights_of

NAN, INF = math.nan, math.inf
HALF = math.log(0.5)
LOW = 0.125
"""An entropy below the threshold of `stare`."""


def low(advantage: float, *surprisals: float) -> Row:
    return Row(advantage, [-value for value in surprisals], [LOW] * len(surprisals))


def undecided(advantage: float, *entropies: float, span: AnswerSpan | None = None) -> Row:
    return Row(advantage, (), entropies, span)


LOG_PROBS = [-0.5, -2.0, -1.0, -4.0, -0.25, -0.125, -8.0]
WRONG = Row(-1.0, LOG_PROBS, [NAN] * 7, SPAN)  # entropies are not read
TWO = AnswerSpan(2, 2, 2, 2)
SIGNS = [Row(advantage, [-1.0, -2.0], span=TWO) for advantage in (-1.0, 0.0, 1.0)]
KEPT, ONES = [0, 1], [1, 1]
ABOVE_ZERO = Row(-1.0, [0.25, -0.0, 0.0], span=AnswerSpan(3, 3, 3, 3))
# Ten tokens, of which a fifth is two; the row of the highest has advantage 0, another has no token kept.
TEN = [undecided(0.0, 9, 1, 2), undecided(-1.0, 3, 8, 4, 5), undecided(1.0, 6, 7, 0)]
TIED = [undecided(1.0, 2, 1, 1), undecided(-1.0, 1, 0, 0, 0, 0, 0, 0)]
# Eleven tokens with a positive advantage, three with a negative one: a tenth is two, and one.
OF_ALL_SIGNS = [low(1.0, 1, 2, 9, 4), low(0.5, 5, 6, 8, 7), low(-1.0, 30, 10, 20), low(0.0, 99, 99), low(2.0, 3, 3, 3)]
CHOSEN = [[1, 1, 1.1, 1], [1, 1, 1.1, 1], [1, 1, 1], [1, 1], [1, 1, 1]]

BY_HAND: dict[str, tuple[Signal, list[Row], list]] = {
    "surprisal: the least likely reasoning token": (Surprisal(), [WRONG], [[0, 1, 0, 0, 0, 0, 0]]),
    "no answer": (Surprisal(), [Row(-1.0, LOG_PROBS)], [[1] * 7]),
    "nothing before the answer": (Surprisal(), [Row(-1.0, LOG_PROBS, span=AnswerSpan(0, 1, 2, 3))], [[1] * 7]),
    "mass": (Surprisal(normalize_mass=True, reshaper_options={"k": 2}), [WRONG], [[0, 3.5, 3.5, 0, 0, 0, 0]]),
    "gate wrong": (Surprisal(gate="wrong"), SIGNS, [KEPT, ONES, ONES]),
    "gate correct": (Surprisal(gate="correct"), SIGNS, [ONES, ONES, KEPT]),
    "rounded above 0: all equal, so the first": (Surprisal(), [ABOVE_ZERO], [[1, 0, 0]]),
    # Mean 2: ratios 0.5, 0, 2.5 and 1. With or without an answer, and whatever the sign; or rounded below 0.
    "entropy": (
        Entropy(),
        [undecided(-1.0, 1, 0, 5, 2), undecided(0.5, 1, 0, 5, 2, span=TWO), undecided(0.0, 1, 5), undecided(1, -0.25, 1)],
        [[0.95, 0.9, 1.15, 1], [0.95, 0.9, 1.15, 1], [1, 1], [0.9, 1.1]],
    ),
    "high_entropy": (HighEntropy(), TEN, [[5, 0, 0], [0, 5, 0, 0], [0, 0, 0]]),
    "rounded up": (HighEntropy(rho=0.21, denominator="all"), TEN, [[1, 0, 0], [0, 1, 0, 0], [0, 1, 0]]),
    # Two of ten, and two more that tie.
    "ties are kept and counted": (HighEntropy(), TIED, [[2.5] * 3, [2.5, 0, 0, 0, 0, 0, 0]]),
    "a broken row counts nowhere": (
        HighEntropy(),
        [undecided(1.0, NAN, 50, 60, 70, 80), undecided(-1.0, 4, 1, 2, 3, 0)],
        [[1] * 5, [5, 0, 0, 0, 0]],
    ),
    "entropy_bonus": (
        EntropyBonus(),
        [undecided(advantage, 0, 0.5, 1, 2, -0.25) for advantage in (1.0, -1.0, 0.5, -4.0, 0.0)],
        [[1, 1.2, 1.4, 1.5, 1], [1, 0.8, 0.6, 0.5, 1], [1, 1.4, 1.5, 1.5, 1], [1, 0.95, 0.9, 0.8, 1], [1] * 5],
    ),
    "probability": (
        Probability(),
        [Row(advantage, [0.0, HALF, 2 * HALF, -200.0, 0.25]) for advantage in (1.0, -1.0, 0.0)],
        [[1, 0.9, 0.85, 0.8, 1], [1, 0.9, 0.85, 0.8, 1], [1] * 5],
    ),
    "stare": (Stare(), OF_ALL_SIGNS, CHOSEN),
    "C2": (Stare(variant="C2"), OF_ALL_SIGNS, [*CHOSEN[:2], [0.9, 1, 1], *CHOSEN[3:]]),
    "at the threshold": (Stare(threshold=0.5), [Row(1.0, [-1.0], [0.5])], [[1.0]]),
    "stare, a broken row": (
        Stare(), [Row(1.0, [-9.0] * 20, [5.0] * 19 + [INF]), low(1.0, 1, 2)], [[1] * 20, [1, 1.1]],
    ),
    "PSR": (Polarity(wrong=0), SIGNS, [[0, 0], ONES, ONES]),
    "W-REINFORCE": (Polarity(right=0.1), SIGNS, [ONES, ONES, [0.1, 0.1]]),
    "a token's mass for each wrong row": (
        Polarity(wrong=3, spread=True, spread_over="wrong"), [*SIGNS, WRONG], [[1.5, 1.5], ONES, ONES, [3 / 7] * 7],
    ),
    # A fifth of seven tokens is two: the likeliest of a wrong row, the least likely of a right one.
    "a3po": (
        A3po(), [WRONG, Row(0.5, LOG_PROBS), Row(0.0, LOG_PROBS)],
        [[1, 1, 1, 1, 2, 2, 1], [1, 1, 1, 2, 1, 1, 2], [1] * 7],
    ),
    # |A (1 - p) (log p + H)|: 2 * 0.5 * |H - log 2|, so 0, 2 and 1; a certain token changes nothing.
    "steer": (
        Steer(),
        [Row(-2.0, [HALF, HALF, 0.0], [-HALF, 2 - HALF, 9]), Row(2.0, [HALF], [1 - HALF]), Row(0.0, [HALF], [99])],
        [[1.2, 0.8, 1.2], [1.0], [1]],
    ),
    "steer, all equal": (Steer(), [Row(1.0, [HALF] * 2, [3] * 2)], [[1, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    signal, rows, expected = BY_HAND[case]
    close(weights_of(signal, rows), expected)


@pytest.mark.parametrize(("step", "weight"), [(0, 2.0), (50, 1.75), (200, 1.0), (999, 1.0)])
def test_a3po_falls_over_the_steps(step: int, weight: float) -> None:
    batch = replace(batch_of([Row(0.5, [-1.0, -2.0])]), step=step)
    assert result_of(A3po(), batch).weights_BT.tolist() == [[1.0, weight]]
    assert result_of(A3po(decay_steps=0), batch).weights_BT.tolist() == [[1.0, 2.0]]


def test_polarity_refuses_to_train_nothing() -> None:
    with pytest.raises(ValueError, match=r"polarity\.right=0 and polarity\.wrong=0: nothing would train"):
        Polarity(right=0, wrong=0)


@pytest.mark.parametrize("signal", [HighEntropy(), Stare(variant="C2", threshold=10.0), Steer()])
def test_rows_may_come_in_any_order(signal: Signal) -> None:
    rows = random_rows(7)  # hardly two values are the same
    found = weights_of(signal, rows)
    assert weights_of(signal, rows[::-1]) == found[::-1]
    assert len({weight for row in found for weight in row}) > 1


def test_bounds_of_the_entropy_bonus_are_flagged() -> None:
    entropies = (0.0, 0.5, 1.0, 2.0)
    rows = [undecided(advantage, *entropies) for advantage in (1.0, -1.0, 0.0)]
    for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
        found = result_of(EntropyBonus(kappa=kappa, alpha=0.4), batch_of(rows))
        bound = [0.4 * entropy >= 1 / kappa for entropy in entropies]
        assert found.at_upper_bound_BT.tolist() == [bound, [False] * 4, [False] * 4]
        assert found.at_lower_bound_BT.tolist() == [[False] * 4, bound, [False] * 4]


def test_stare_takes_the_mean_entropy_as_the_loss_takes_it() -> None:
    def mean_of_row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        assert mask_BT.sum() == 8 and bool(values_BT.isfinite().all())
        return float(((values_BT * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1)).mean())

    # By tokens 0.2125, by rows 0.1625.
    rows = [Row(1.0, [-1.0], [LOW]), Row(-1.0, [-1.0] * 7, [0.225] * 7)]
    for threshold, by_tokens, by_rows in ((0.15, 1.0, 1.0), (0.2, 1.0, 1.1), (0.25, 1.1, 1.1)):
        close(weights_of(Stare(threshold=threshold), rows), [[by_tokens], [1] * 7])
        found = weights_of(Stare(threshold=threshold), rows, aggregate=mean_of_row_means, extra=2)
        close(found, [[by_rows], [1] * 7])
