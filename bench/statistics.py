"""Means with intervals, and paired comparisons."""

import math
from collections.abc import Mapping
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


def mean_of(values: pd.Series) -> Estimate:
    """Mean and standard error of the means of clusters, which are independent; the index says the cluster of each value.
    NaN counts nowhere."""
    means = values.groupby(level=0).mean().dropna()
    return Estimate(means.mean(), means.sem(), len(means))


def jackknife(values: np.ndarray) -> Estimate:
    """A figure over all of its independent parts, then without each of them, (1 + P,), with its standard error."""
    without = pd.Series(values[1:])
    # The sum of squares times (P - 1) / P; not known of a single part.
    error = (len(without) - 1) * without.sem()
    return Estimate(values[0], error, len(without))


def above_controls(own_W: pd.Series, controls_WC: pd.DataFrame) -> Estimate:
    """By how much values are above their controls; both samples' clusters are independent.

    Args:
        own_W: values of W responses, all finite; the index says the cluster of each, such as its problem.
        controls_WC: for each of them the value of each of C control responses at its place, by the same index and the
            controls' clusters; NaN where it is no control of it. A response without any counts nowhere.
    """
    means_W = controls_WC.mean(axis=1)
    # Equal figures differ by rounding, and a difference of 1e-17 would have a p-value.
    gain_W = (own_W - means_W).round(9).dropna()
    parts_WC = controls_WC.sub(means_W, axis=0).div(controls_WC.count(axis=1), axis=0)
    freedoms = []
    variances = []
    # What each response adds to the mean gain: of the controls, by how much they are above the others of the same value.
    for parts in (gain_W - gain_W.mean(), parts_WC.sum().round(9)):
        sums = (parts / len(gain_W)).groupby(level=0).sum()
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
