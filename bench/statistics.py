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
    count: float
    """Independent parts: problems, groups or models; of a difference of two samples, its degrees of freedom and 1."""

    @property
    def half(self) -> float:
        """Half of the 95 % interval by Student's distribution; nan where the error is not known."""
        return float(stats.t.ppf((1 + LEVEL) / 2, self.count - 1)) * self.error if self.count > 1 else math.nan

    @property
    def p(self) -> float:
        """p-value of a mean of 0, two-sided; nan where the error is not known. 0 where all parts agree on another value."""
        if self.count < 2 or math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return float(self.value == 0)
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
    them and what differs between the problems of each. One model's figure is itself."""
    return estimates[0] if len(estimates) == 1 else mean_of([one.value for one in estimates])


def above_controls(
    own_W: np.ndarray, controls_WC: np.ndarray, clusters_W: Sequence[Hashable], clusters_C: Sequence[Hashable]
) -> tuple[Estimate, Estimate]:
    """The mean of the values' controls, and by how much the values are above them; both samples' clusters are independent.

    Args:
        own_W: values of W responses, all finite.
        controls_WC: for each of them the value of each of C control responses at its place; nan where it is no control of it.
            Every response has one.
        clusters_W: problems of the responses, ``clusters_C`` of the controls.
    """
    counts_W1, means_W1 = (
        np.isfinite(controls_WC).sum(axis=1, keepdims=True),
        np.nanmean(controls_WC, axis=1, keepdims=True),
    )
    gain_W, control = np.round(own_W - means_W1[:, 0], 9), float(means_W1.mean())
    # What each response adds to the mean gain: of the controls, by how much they are above the others of the same value.
    parts_C = np.round(np.nansum((controls_WC - means_W1) / counts_W1, axis=0), 9) / len(own_W)
    errors, freedoms = [], []
    for parts, clusters in (((gain_W - gain_W.mean()) / len(own_W), clusters_W), (parts_C, clusters_C)):
        sums = np.bincount(np.unique([str(one) for one in clusters], return_inverse=True)[1], parts)
        errors.append(float((sums**2).sum() * len(sums) / max(1, len(sums) - 1)))
        freedoms.append(max(1, len(sums) - 1))
    variances = np.array(errors)
    freedom = float(variances.sum() ** 2 / (variances**2 / freedoms).sum()) if variances.any() else min(freedoms)
    of_controls = Estimate(control, math.sqrt(errors[1]), freedoms[1] + 1)
    return of_controls, Estimate(float(gain_W.mean()), math.sqrt(variances.sum()), freedom + 1)


def auroc(values_N: np.ndarray, true_N: np.ndarray) -> float:
    """Probability that a true token has a higher value than another one, ties counting half; nan where either is missing."""
    true = int(true_N.sum())
    pairs = true * (len(true_N) - true)
    return float(stats.rankdata(values_N)[true_N].sum() - true * (true + 1) / 2) / pairs if pairs else math.nan


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
