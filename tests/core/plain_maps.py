"""The maps from scores to weights, the plain way: lists of floats in loops, shares of counts as exact fractions. Each takes the
scores of the tokens of one statistics set. Nothing here is shared with the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any


def part(share: float, count: int) -> int:
    """A share, as it is written in decimals, of a count; rounded up, at least 1."""
    return max(1, math.ceil(Fraction(str(share)) * count))


def chosen(scores: Sequence[float], places: Sequence[Any], count: int) -> list[Any]:
    """Places of the highest scores, of equal ones the first."""
    order = sorted(range(len(places)), key=lambda index: -scores[index])  # which keeps the order of equal ones
    return [places[index] for index in order[:count]]


def top(scores: Sequence[float], k: int = 1, share: float | None = None) -> list[float]:
    """1 on the k highest scores, the earlier ones of equal ones, else 0."""
    count = k if share is None else part(share, len(scores))
    kept = chosen(scores, range(len(scores)), count)
    return [1.0 if index in kept else 0.0 for index in range(len(scores))]


def power(scores: Sequence[float], exponent: float = 2.0) -> list[float]:
    """n s^g / sum s^g, all 1 where the sum is below 1e-8."""
    powers = [max(0.0, score) ** exponent for score in scores]
    total = math.fsum(powers)
    return [1.0] * len(scores) if total < 1e-8 else [len(scores) * value / total for value in powers]


def mean_ratio(scores: Sequence[float], beta: float = 0.1) -> list[float]:
    """max(0, 1 + beta (x / mean - 1)), all 1 where the mean is not above 0."""
    mean = math.fsum(scores) / len(scores) if scores else 0.0
    if not mean > 0:
        return [1.0] * len(scores)
    return [max(0.0, 1 + beta * (score / mean - 1)) for score in scores]


def bilevel(
    scores: Sequence[float], quantile: float = 0.4, boost: float = 2.0, quantile_rule: str = "linear"
) -> list[float]:
    """max(h / tau, 0.1) below the quantile tau, else 1 + boost (h - tau) / (1 - tau)."""
    levels = [math.log1p(max(score, -1 + 1e-8)) for score in scores]
    if not levels or min(levels) == max(levels):
        return [1.0] * len(levels)
    low, high = min(levels), max(levels)
    scaled = [(level - low) / (high - low) for level in levels]
    ranked = sorted(scaled)
    if quantile_rule == "sorted":
        tau = ranked[min(math.floor(quantile * len(ranked)), len(ranked) - 1)]
    else:
        place = quantile * (len(ranked) - 1)
        below = ranked[math.floor(place)]
        above = ranked[min(math.floor(place) + 1, len(ranked) - 1)]
        tau = below + (place - math.floor(place)) * (above - below)
    weights = []
    for h in scaled:
        if h < tau:
            weights.append(max(h / tau, 0.1))
        else:
            weights.append(1 + boost * (h - tau) / (1 - tau) if tau < 1 else 1.0)
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
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / len(logs) + 1e-8)
    return [min(max(weight_mean + weight_std * (value - mean) / deviation, weight_min), weight_max) for value in logs]


def to_mass(weights: Sequence[float], places: Sequence[int]) -> list[float]:
    """Scale the weights at these places so that they sum to their number, where their sum is above 0."""
    total = math.fsum(weights[index] for index in places)
    scale = len(places) / total if total > 0 else 1.0
    return [weight * scale if index in places else weight for index, weight in enumerate(weights)]


MAPS: dict[str, Callable[..., list[float]]] = {of.__name__: of for of in (top, power, mean_ratio, bilevel, log_zscore)}
