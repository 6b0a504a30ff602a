"""Means with intervals, and paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats


class Estimate(NamedTuple):
    """A figure with its standard error."""

    value: float
    # nan where it is not known
    error: float = math.nan
    # Independent parts, such as problems; of a difference of two samples, its degrees of freedom and 1
    count: float = 1

    @property
    def half(self) -> float:
        """Half of the 95 % interval by Student's distribution; nan where the error is not known."""
        return stats.t.ppf(0.975, self.count - 1) * self.error

    @property
    def p(self) -> float:
        """p-value of a mean of 0, two-sided; nan where the error is not known. 0 where all parts agree on another value."""
        if self.error == 0:
            return float(self.value == 0)
        return 2 * stats.t.sf(abs(self.value) / self.error, self.count - 1)


def mean_of(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Mean and standard error of the values that are not NaN; with clusters, of the clusters' means, which are independent."""
    series = pd.Series(np.asarray(values, dtype=float), index=clusters)
    means = series.dropna().groupby(level=0).mean()
    return Estimate(means.mean(), means.sem(), len(means))


def jackknife(values: np.ndarray) -> Estimate:
    """A figure over all of its independent parts, then without each of them, (1 + P,), with its standard error."""
    without = pd.Series(values[1:])
    # The sum of squares times (P - 1) / P; not known of a single part.
    error = (len(without) - 1) * without.sem()
    return Estimate(values[0], error, len(without))


def above_controls(
    own_W: np.ndarray,
    controls_WC: np.ndarray,
    clusters_W: Sequence[Hashable],
    clusters_C: Sequence[Hashable],
) -> Estimate:
    """By how much values are above their controls; both samples' clusters are independent.

    Args:
        own_W: values of W responses, all finite.
        controls_WC: for each of them the value of each of C control responses at its place; nan where it is no control
            of it. Every response has one.
        clusters_W: problems of the responses, ``clusters_C`` of the controls.
    """
    counts_W1 = np.isfinite(controls_WC).sum(axis=1, keepdims=True)
    means_W1 = np.nanmean(controls_WC, axis=1, keepdims=True)
    # Equal figures differ by rounding, and a difference of 1e-17 would have a p-value.
    gain_W = np.round(own_W - means_W1[:, 0], 9)
    gain_C = np.round(np.nansum((controls_WC - means_W1) / counts_W1, axis=0), 9)
    freedoms = []
    variances = []
    # What each response adds to the mean gain: of the controls, by how much they are above the others of the same value.
    for parts, clusters in ((gain_W - gain_W.mean(), clusters_W), (gain_C, clusters_C)):
        sums = pd.Series(parts / len(own_W)).groupby(clusters).sum()
        freedoms.append(max(1, len(sums) - 1))
        variances.append((sums**2).sum() * len(sums) / freedoms[-1])
    freedom = min(freedoms)
    # Welch and Satterthwaite's degrees of freedom, which are 0 / 0 without a variance
    if any(variances):
        freedom = sum(variances) ** 2 / (np.square(variances) / freedoms).sum()
    return Estimate(gain_W.mean(), math.sqrt(sum(variances)), freedom + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values by name, corrected for their number (Holm 1979); nan counts as 1."""
    series = pd.Series(p_values, dtype=float).fillna(1).sort_values()
    # Of 0.01, 0.02 and 0.04 the smallest counts three times, the next twice.
    return (series * np.arange(len(series), 0, -1)).cummax().clip(upper=1).to_dict()
