"""Paired comparisons of arms over seeds, and rank figures of token scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import integrate, optimize, stats

LEVEL = 0.95
RESAMPLES = 4_000
_CHUNK = 500


@dataclass(frozen=True)
class Paired:
    """Differences within seeds: their mean, its 95 % interval by Student's distribution, and the p-value of mean zero."""

    count: int
    mean: float
    deviation: float
    """Standard deviation of the differences; nan with a single one."""
    low: float
    high: float
    p: float
    """Two-sided paired t-test."""


def paired(differences: Sequence[float]) -> Paired:
    """Paired t-test of differences by seed; with a single one, interval and p are nan.

    Raises:
        ValueError: no difference.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not len(values):
        raise ValueError("no differences: the two arms have no seed in common")
    mean = float(values.mean())
    if len(values) == 1:
        return Paired(1, mean, math.nan, math.nan, math.nan, math.nan)
    deviation = float(values.std(ddof=1))
    error = deviation / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, len(values) - 1)) if error > 0 else float(mean == 0)
    return Paired(len(values), mean, deviation, mean - half, mean + half, p)


def t_interval(difference: Paired, level: float) -> tuple[float, float]:
    """The interval of another level by Student's distribution; nan ends with a single difference."""
    half = (
        float(stats.t.ppf((1 + level) / 2, difference.count - 1)) * difference.deviation / math.sqrt(difference.count)
    )
    return difference.mean - half, difference.mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979)."""
    order = np.argsort(p_values)
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def equivalence_p(differences: Sequence[float], bound: float) -> float:
    """p-value of two one-sided paired t-tests (TOST, Schuirmann 1987): that the mean lies beyond ``bound`` on either side.

    Below 0.05, the mean lies between ``-bound`` and ``bound``; the same as a 90 % interval inside these.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return math.nan
    error = values.std(ddof=1) / math.sqrt(len(values))
    if error == 0:
        return float(abs(values.mean()) >= bound)
    distance = (bound - abs(values.mean())) / error
    return float(stats.t.sf(distance, len(values) - 1))


def detectable(deviation: float, count: int, level: float, power: float = 0.8) -> float:
    """The true mean that a two-sided paired t-test of ``count`` differences finds with that probability."""
    bar = float(stats.t.ppf(1 - level / 2, count - 1))

    def missing(shift: float) -> float:
        return float(stats.nct.sf(bar, count - 1, shift)) - power  # the other tail holds next to nothing

    return float(optimize.brentq(missing, 0.0, 4 * bar)) * deviation / math.sqrt(count)


def equivalence_power(deviation: float, count: int, bound: float, level: float = 0.05) -> float:
    """Probability that :func:`equivalence_p` comes out below ``level`` where the true mean is 0."""
    error, bar = deviation / math.sqrt(count), float(stats.t.ppf(1 - level, count - 1))

    def inside(squares: float) -> float:
        room = bound - bar * error * math.sqrt(squares / (count - 1))
        return max(0.0, 2 * float(stats.norm.cdf(room / error)) - 1) * float(stats.chi2.pdf(squares, count - 1))

    return float(integrate.quad(inside, 0, (count - 1) * (bound / (bar * error)) ** 2, limit=200)[0])


def pass_at(right_P: Sequence[int], samples: int, k: int) -> float:
    """pass@k without bias (arXiv 2107.03374): the probability that of ``k`` of the samples at least one is right, mean over
    problems.

    Args:
        right_P: right samples of each problem.
        samples: of each problem.
        k: at most ``samples``.
    """
    return float(np.mean([1 - math.comb(samples - right, k) / math.comb(samples, k) for right in right_P]))


def correlation_interval(first_N: Sequence[float], second_N: Sequence[float]) -> tuple[float, float, float]:
    """Pearson's correlation with its 95 % interval by Fisher's transformation."""
    result = stats.pearsonr(first_N, second_N)
    ends = result.confidence_interval(LEVEL)
    return float(result.statistic), float(ends.low), float(ends.high)


def two_way_bootstrap(differences_SP: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean over seeds and problems, both drawn anew.

    A resample draws as many seeds as there are, with replacement, and for each draw as many of that seed's problems as it has:
    every seed has problems of its own.

    Args:
        differences_SP: one arm's accuracy minus another's, of every problem of every seed.
        seed: of the resampling.
    """
    seeds, problems = differences_SP.shape
    generator = np.random.default_rng(seed)
    means = []
    for first in range(0, RESAMPLES, _CHUNK):
        count = min(_CHUNK, RESAMPLES - first)
        rows = generator.integers(seeds, size=(count, seeds, 1))
        columns = generator.integers(problems, size=(count, seeds, problems))
        means.append(differences_SP[rows, columns].mean(axis=(1, 2)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by Student's distribution; nan ends with a single value."""
    result = paired(values)
    return result.mean, result.low, result.high


def auroc(scores_N: np.ndarray, true_N: np.ndarray) -> float:
    """Probability that a true token has a higher score than another one, ties counting half; nan where either kind is
    missing."""
    if true_N.all() or not true_N.any():
        return math.nan
    true, others = scores_N[true_N][:, None], scores_N[~true_N][None]
    return float(np.mean((true > others) + 0.5 * (true == others)))


def spearman(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Rank correlation with average ranks for ties; nan where either is constant."""
    constant = len(np.unique(first_N)) < 2 or len(np.unique(second_N)) < 2
    return math.nan if constant else float(stats.spearmanr(first_N, second_N).statistic)
