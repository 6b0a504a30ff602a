"""Means with intervals, ranks, and paired comparisons."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95


class Estimate(NamedTuple):
    """A figure with its standard error."""

    value: float
    error: float
    """nan where it is not known."""
    count: int
    """Independent parts: problems, groups or models."""

    @property
    def half(self) -> float:
        """Half of the 95 % interval by Student's distribution; nan where the error is not known."""
        return float(stats.t.ppf((1 + LEVEL) / 2, self.count - 1)) * self.error if self.count > 1 else math.nan

    @property
    def p(self) -> float:
        """p-value of a mean of 0, two-sided; nan where the error is not known."""
        if self.count < 2 or not self.error > 0:
            return math.nan
        return float(2 * stats.t.sf(abs(self.value) / self.error, self.count - 1))


def mean_of(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Mean and standard error of the finite values; with clusters, of the clusters' means, which are independent."""
    parts: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, range(len(values)) if clusters is None else clusters, strict=True):
        if math.isfinite(value):
            parts[cluster].append(value)
    means = np.array([np.mean(part) for part in parts.values()])
    if not len(means):
        return Estimate(math.nan, math.nan, 0)
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return Estimate(float(means.mean()), error, len(means))


def pooled(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over several models' figures; the models are the independent parts, so that the error holds what differs between
    them and what differs between the problems of each."""
    return mean_of([one.value for one in estimates])


def auroc(values_N: np.ndarray, true_N: np.ndarray) -> float:
    """Probability that a true token has a higher value than another one, ties counting half; nan where either is missing."""
    if true_N.all() or not true_N.any():
        return math.nan
    true, others = values_N[true_N][:, None], values_N[~true_N][None]
    return float(((true > others) + 0.5 * (true == others)).mean())


def largest_is(values_N: np.ndarray, true_N: np.ndarray) -> float:
    """Probability that the largest value is a true one where ties are broken evenly."""
    return float(true_N[values_N == values_N.max()].mean())


def cosine(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Cosine of two directions; 0 where one is zero."""
    norm = float(np.linalg.norm(first_N) * np.linalg.norm(second_N))
    return float(first_N @ second_N) / norm if norm else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979)."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(np.argsort(p_values)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def pass_at(correct_P: Sequence[int], samples: int, k: int) -> float:
    """pass@k without bias (arXiv 2107.03374): the probability that of ``k`` of the samples at least one is correct, mean over
    problems, from the number of correct samples of each."""
    return float(np.mean([1 - math.comb(samples - right, k) / math.comb(samples, k) for right in correct_P]))
