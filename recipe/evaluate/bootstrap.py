"""Percentile bootstrap over problems.

A resample draws as many problems as a benchmark has, with replacement; the samples of a problem stay together, since they
are not independent of each other. Benchmarks are resampled independently, each from a random generator of its own, so that
its interval does not depend on which others are evaluated. Comparing two runs takes the same resamples of problems for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0
# Differences of means are sums of fractions, so that equal runs may differ by rounding.
_ROUNDING = 1e-9


def resample_counts(benchmark: str, problems: int) -> np.ndarray:
    """How often each problem is in each resample: (resamples, problems) int64, every row sums to ``problems``."""
    key = int.from_bytes(hashlib.sha256(benchmark.encode()).digest()[:8], "big")
    generator = np.random.default_rng([SEED, key])
    return generator.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)


def resampled_means(benchmark: str, values_PM: np.ndarray) -> np.ndarray:
    """Mean of every metric in every resample: (resamples, metrics), from one row a problem and one column a metric."""
    problems = len(values_PM)
    return resample_counts(benchmark, problems) @ values_PM / problems


def over_benchmarks(values: Mapping[str, np.ndarray], problems: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Plain mean over benchmarks and mean weighted by their numbers of problems, of arrays of one shape."""
    stacked = np.stack(list(values.values()))
    weights = np.array([problems[name] for name in values], dtype=float)
    return stacked.mean(axis=0), np.tensordot(weights / weights.sum(), stacked, axes=1)


def interval(means_RM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the 95 % interval of every metric, each (metrics,)."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means_RM, [tail, 1 - tail], axis=0)
    return low, high


def share_above_zero(means_RM: np.ndarray) -> np.ndarray:
    """Share of resamples in which each metric is above 0, (metrics,)."""
    return (means_RM > _ROUNDING).mean(axis=0)
