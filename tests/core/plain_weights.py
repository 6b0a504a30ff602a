"""Maps from scores to weights, and weights of the methods that read old log-probabilities and entropies, the plain way.

Nothing of it but the span's four numbers is the package's: a response is lists of floats, everything is a loop, shares of
counts are exact fractions. A map takes the scores of the tokens of one statistics set.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import AnswerSpan, Method, Rollouts
from tests.core.common import rollouts_of, weighed

NAN = math.nan
Weights = list[list[float]]
"""One weight for each token of each response."""


@dataclass
class Row:
    """A response: one log-probability and one entropy for each token, both exact in float32."""

    advantage: float
    log_probs: Sequence[float] = ()
    entropies: Sequence[float] = ()
    span: AnswerSpan | None = None
    trained: Sequence[bool] = field(default=())
    """By default every token trains."""

    def __post_init__(self):
        length = max(len(self.log_probs), len(self.entropies))
        self.log_probs = list(self.log_probs) or [-1.0] * length
        self.entropies = list(self.entropies) or [1.0] * length
        self.trained = list(self.trained) or [True] * length
        self.tokens = [index for index, trained in enumerate(self.trained) if trained]
        self.sound = all(
            math.isfinite(values[index])
            for values in (self.log_probs, self.entropies)
            for index in self.tokens
        )

    def ones(self) -> list[float]:
        """Weight 1 on every token that trains."""
        return [1.0 if trained else 0.0 for trained in self.trained]


def random_rows(seed: int, count: int = 12) -> list[Row]:
    """Responses of 0 to 14 tokens, some of them with next to no entropy. Every second draw has many ties."""
    draw = random.Random(seed)
    # Numbers in 64ths, or in halves, of which many are equal.
    step = 64 if seed % 2 else 2
    rows = []
    for _ in range(count):
        length = draw.choice([0, 1, 2, 3, 5, 8, 14])
        start, content, end = sorted(draw.randint(0, length) for _ in range(3))
        # Next to no entropy: 2^-40 is lost beside 1 in float32.
        size = draw.choice([1, 1, 1, 2.0**-14, 2.0**-40])
        advantage = draw.choice([-2.0, -0.75, -0.0625, 0.0, 0.0625, 0.5, 1.25])
        log_probs = [-draw.randint(0, 6 * step) / step for _ in range(length)]
        entropies = [size * draw.randint(0, 2 * step) / step for _ in range(length)]
        span = (
            AnswerSpan(start, content, end, length)
            if length and draw.random() < 0.7
            else None
        )
        trained = (
            [draw.random() < 0.8 for _ in range(length)] if draw.random() < 0.3 else ()
        )
        rows.append(Row(advantage, log_probs, entropies, span, trained))
    return rows


def batch_of(rows: Sequence[Row], *, extra: int = 0, **parts) -> Rollouts:
    """The responses side by side, padded on the right, with NaN wherever no token trains."""
    width = max((len(row.trained) for row in rows), default=0) + extra
    masks = torch.zeros(len(rows), width, dtype=torch.bool)
    columns = {
        name: torch.full((len(rows), width), NAN) for name in ("old_log_probs", "entropy")
    }
    for index, row in enumerate(rows):
        for token in row.tokens:
            masks[index, token] = True
            columns["old_log_probs"][index, token] = row.log_probs[token]
            columns["entropy"][index, token] = row.entropies[token]
    ids = [[0] * width] * len(rows)
    advantages = [row.advantage for row in rows]
    return rollouts_of(
        ids, advantages, masks, [row.span for row in rows], columns=columns, **parts
    )


def weights_of(method: Method, rows: Sequence[Row], **parts) -> Weights:
    """The package's weights of each response's tokens."""
    weights = weighed(method, batch_of(rows, **parts)).weights
    return [weights[index, : len(row.trained)].tolist() for index, row in enumerate(rows)]


def close(
    got: Sequence[Sequence[float]],
    expected: Sequence[Sequence[float]],
    tolerance: float = 1e-6,
):
    """Row by row, so that a failure names the response."""
    for index, (values, desired) in enumerate(zip(got, expected, strict=True)):
        assert values == pytest.approx(desired, rel=tolerance, abs=tolerance), (
            f"response {index}"
        )


def part(share: float, count: int) -> int:
    """A share, as it is written in decimals, of a count; rounded up, at least 1."""
    return max(1, math.ceil(Fraction(str(share)) * count))


def chosen(scores: Sequence[float], places: Sequence[Any], count: int) -> list[Any]:
    """Places of the highest scores, of equal ones the first."""
    # Sorting keeps the order of equal ones.
    order = sorted(range(len(places)), key=lambda index: -scores[index])
    return [places[index] for index in order[:count]]


def top(scores: Sequence[float], k: int = 1, share: float | None = None) -> list[float]:
    """1 on the k highest scores, the earlier ones of equal ones, else 0."""
    count = k if share is None else part(share, len(scores))
    highest = chosen(scores, range(len(scores)), count)
    return [1.0 if index in highest else 0.0 for index in range(len(scores))]


def power(scores: Sequence[float], exponent: float = 2.0) -> list[float]:
    """n s^g / sum s^g, all 1 where the sum is below 1e-8."""
    # Scores 1 and 2 with 2: 1 and 4 of 5, so 0.4 and 1.6.
    powers = [max(0.0, score) ** exponent for score in scores]
    total = math.fsum(powers)
    if total < 1e-8:
        return [1.0] * len(scores)
    return [len(scores) * value / total for value in powers]


def mean_ratio(scores: Sequence[float], beta: float = 0.1) -> list[float]:
    """max(0, 1 + beta (x / mean - 1)), all 1 where the mean is not above 0."""
    mean = math.fsum(scores) / len(scores) if scores else 0.0
    if not mean > 0:
        return [1.0] * len(scores)
    return [max(0.0, 1 + beta * (score / mean - 1)) for score in scores]


def bilevel(
    scores: Sequence[float],
    quantile: float = 0.4,
    boost: float = 2.0,
    quantile_rule: str = "linear",
) -> list[float]:
    """max(h / tau, 0.1) below the quantile tau, else 1 + boost (h - tau) / (1 - tau)."""
    levels = [math.log1p(max(score, -1 + 1e-8)) for score in scores]
    if not levels or min(levels) == max(levels):
        return [1.0] * len(levels)
    low = min(levels)
    scaled = [(level - low) / (max(levels) - low) for level in levels]
    if quantile_rule == "sorted":
        tau = sorted(scaled)[min(math.floor(quantile * len(scaled)), len(scaled) - 1)]
    else:
        tau = float(np.quantile(scaled, quantile))
    weights = []
    for h in scaled:
        if h < tau:
            weights.append(max(h / tau, 0.1))
        elif tau < 1:
            weights.append(1 + boost * (h - tau) / (1 - tau))
        else:
            weights.append(1.0)
    return weights


def log_zscore(
    scores: Sequence[float],
    weight_mean: float = 1,
    weight_std: float = 0.5,
    weight_min: float = 0.5,
    weight_max: float = 5,
) -> list[float]:
    """clip(mean + std z, min, max), z the log score less its mean over the root of its population variance."""
    if not scores:
        return []
    logs = [math.log(max(score, 0.0) + 1e-8) for score in scores]
    mean = statistics.fmean(logs)
    deviation = math.sqrt(statistics.pvariance(logs) + 1e-8)
    return [
        min(
            max(weight_mean + weight_std * (value - mean) / deviation, weight_min),
            weight_max,
        )
        for value in logs
    ]


def to_mass(weights: Sequence[float], places: Sequence[int]) -> list[float]:
    """Scale the weights at these places so that they sum to their number, where their sum is above 0."""
    total = math.fsum(weights[index] for index in places)
    # Weights 5, 1, 1: mass 7 over 3 tokens, so 15/7, 3/7, 3/7.
    scale = len(places) / total if total > 0 else 1.0
    return [
        weight * scale if index in places else weight
        for index, weight in enumerate(weights)
    ]


MAPS = {
    "top": top,
    "power": power,
    "mean_ratio": mean_ratio,
    "bilevel": bilevel,
    "log_zscore": log_zscore,
}


def through_map(
    rows: Sequence[Row],
    score: Callable[[Row], list[float]],
    reshaper: str,
    gate: str,
    statistics: str,
    normalize_mass: bool = False,
    **options,
) -> Weights:
    """A score for each token, a map, a gate and a statistics set."""
    all_weights = []
    for row in rows:
        of_row = score(row)
        weights = row.ones()
        places = row.tokens
        if statistics == "reasoning":
            places = [
                index for index in places if row.span is not None and index < row.span.start
            ]
        scores = [of_row[index] for index in places]
        signs = {"wrong": (-1,), "correct": (1,), "all": (-1, 1)}
        inside = np.sign(row.advantage) in signs[gate]
        if inside and places and all(map(math.isfinite, scores)):
            if reshaper == "top":
                weights = [0.0] * len(weights)
            for index, weight in zip(
                places, MAPS[reshaper](scores, **options), strict=True
            ):
                weights[index] = weight
            if normalize_mass:
                weights = to_mass(weights, row.tokens if reshaper == "top" else places)
        all_weights.append(weights)
    return all_weights


def each_token(
    rows: Sequence[Row],
    weight: Callable[[Row, int], float],
    normalize_mass: bool = False,
    all_rows: bool = False,
) -> Weights:
    """A weight of its own for every token of the responses with an advantage."""
    all_weights = []
    for row in rows:
        weights = row.ones()
        if row.sound and (all_rows or row.advantage != 0):
            for index in row.tokens:
                weights[index] = weight(row, index)
            if normalize_mass:
                weights = to_mass(weights, row.tokens)
        all_weights.append(weights)
    return all_weights


def high_entropy(
    rows: Sequence[Row], rho: float = 0.2, denominator: str = "selected", **mass: bool
) -> Weights:
    """The tokens at or above the entropy that the share ends with, over all responses."""
    everything = [row.entropies[index] for row in rows if row.sound for index in row.tokens]
    if not everything:
        return [row.ones() for row in rows]
    # All tokens as high as the last of the share count, too.
    cut = sorted(everything, reverse=True)[part(rho, len(everything)) - 1]
    count = sum(1 for value in everything if value >= cut)
    weight = len(everything) / count if denominator == "selected" else 1.0
    return each_token(
        rows,
        lambda row, t: weight if row.entropies[t] >= cut else 0.0,
        all_rows=True,
        **mass,
    )


def entropy_bonus(
    rows: Sequence[Row], alpha: float = 0.4, kappa: float = 2.0, **mass: bool
) -> Weights:
    """(A + min(alpha H, |A| / kappa)) / A."""

    def of_token(row, index):
        # At most |A| / kappa, so that the sign stays.
        bonus = min(alpha * max(0.0, row.entropies[index]), abs(row.advantage) / kappa)
        return (row.advantage + bonus) / row.advantage

    return each_token(rows, of_token, **mass)


def probability(rows: Sequence[Row], alpha: float = 0.2, **mass: bool) -> Weights:
    """alpha p + 1 - alpha."""
    return each_token(
        rows,
        lambda row, t: alpha * math.exp(min(0.0, row.log_probs[t])) + 1 - alpha,
        **mass,
    )


def stare(
    rows: Sequence[Row],
    variant: str = "O1",
    threshold: float = 0.3,
    share: float = 0.1,
    strength: float = 0.1,
    normalize_mass: bool = False,
) -> Weights:
    """The least probable tokens of either sign, while the mean entropy is below the threshold."""
    usable = [row for row in rows if row.sound]
    everything = [row.entropies[index] for row in usable for index in row.tokens]
    all_weights = {id(row): row.ones() for row in rows}
    if math.fsum(everything) / max(1, len(everything)) < threshold:
        # O1 raises the correct ones, C2 also lowers the incorrect ones.
        for sign, weight in ((1, 1 + strength), (-1, 1 - strength))[
            : 1 if variant == "O1" else 2
        ]:
            places = [
                (row, index)
                for row in usable
                if row.advantage * sign > 0
                for index in row.tokens
            ]
            scores = [-row.log_probs[index] for row, index in places]
            for row, index in chosen(
                scores, places, min(len(places), part(share, len(places)))
            ):
                all_weights[id(row)][index] = weight
        if normalize_mass:
            all_weights |= {
                id(row): to_mass(all_weights[id(row)], row.tokens) for row in usable
            }
    return [all_weights[id(row)] for row in rows]


def polarity(
    rows: Sequence[Row],
    right: float = 1.0,
    wrong: float = 1.0,
    spread: bool = False,
    spread_over: str = "both",
) -> Weights:
    """A weight for each sign, for each token or shared by the response's tokens."""

    def of_token(row, _):
        sign, weight = ("right", right) if row.advantage > 0 else ("wrong", wrong)
        return (
            weight / len(row.tokens) if spread and spread_over in (sign, "both") else weight
        )

    return each_token(rows, of_token)


def steer(
    rows: Sequence[Row],
    highest: float = 1.2,
    lowest: float = 0.8,
    normalize_mass: bool = False,
) -> Weights:
    """Linear in |A (1 - p) (log p + H)| between the batch's extremes."""

    def change(row, index):
        log_p = min(0.0, row.log_probs[index])
        entropy_ = max(0.0, row.entropies[index])
        return abs(row.advantage * (1 - math.exp(log_p)) * (log_p + entropy_))

    usable = [row for row in rows if row.advantage != 0 and row.sound]
    changes = [change(row, index) for row in usable for index in row.tokens]
    if len(set(changes)) < 2:
        return [row.ones() for row in rows]

    def weight(row, index):
        # Exactly 1 for the largest, whose weight may be 0.
        share = (change(row, index) - min(changes)) / (max(changes) - min(changes))
        return highest + (lowest - highest) * share

    return each_token(rows, weight, normalize_mass)


METHODS = {
    "surprisal": partial(
        through_map,
        score=lambda row: [max(0.0, -value) for value in row.log_probs],
        reshaper="top",
        gate="wrong",
        statistics="reasoning",
    ),
    "entropy": partial(
        through_map,
        score=lambda row: [max(0.0, value) for value in row.entropies],
        reshaper="mean_ratio",
        gate="all",
        statistics="response",
    ),
    "high_entropy": high_entropy,
    "entropy_bonus": entropy_bonus,
    "probability": probability,
    "stare": stare,
    "polarity": polarity,
    "steer": steer,
}
