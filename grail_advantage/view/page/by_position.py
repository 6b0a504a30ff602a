"""Mean weights by position in the reasoning, over the rollouts of a token dump. Nothing here draws.

Shape suffixes: N responses of the dump, K bins of positions, S steps, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from grail_advantage.dump import DumpRow

BINS = 20
FEWEST = 5
"""Prompts below which a mean has no interval: of two it would be 6.5 times as wide as of many."""
OUTCOMES = ("right", "wrong")


def reasoning(row: DumpRow) -> np.ndarray:
    """The tokens that train and come before the answer, bool (T,); all that train where there is no answer."""
    if row.span is None:
        return row.mask_T
    return row.mask_T & (np.arange(len(row)) < row.span.start)


def binned(values: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Means of consecutive values in bins of equal width of their positions, float64 (bins,).

    Value ``i`` is at ``(i + 1/2) / count`` of the way. NaN values count nowhere; a bin without a value is NaN.
    """
    known = np.isfinite(values)
    place = ((np.arange(len(values)) * 2 + 1) * bins // (2 * max(1, len(values))))[known]
    sums = np.bincount(place, weights=values[known].astype(np.float64), minlength=bins)
    counts = np.bincount(place, minlength=bins)
    return np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)


RowTable = np.recarray
"""The values of a dump's responses that means need, one entry a response: ``step``; ``group``, the same number for responses
to the same prompt in the same update; ``outcome``, ``right``, ``wrong`` or another text; ``scored``, whether the weights are
the method's; and ``profile``, float64 (K,), the mean weight of the reasoning by position, NaN in bins without a token."""


def row_tables(rows: Iterable[DumpRow], bins: int = BINS) -> dict[str, RowTable]:
    """Take responses in, one at a time.

    Args:
        rows: of a dump.
        bins: K.

    Returns:
        A table of the responses' own weights under the empty name, and one for each of several methods that gave them weights.
    """
    kinds = [("step", int), ("group", int), ("outcome", "U7"), ("scored", bool), ("profile", np.float64, (bins,))]
    entries: dict[str, list[tuple]] = {"": []}
    groups: dict[tuple[int, int, int], int] = {}
    for row in rows:
        group = groups.setdefault((row.step, row.update, row.group), len(groups))
        inside_T = reasoning(row)
        sources: dict[str, DumpRow] = {"": row, **row.methods}
        for name, source in sources.items():
            profile = binned(source.weight_T[inside_T], bins)
            entry = row.step, group, row.outcome or "", source.no_scores is None, profile
            entries.setdefault(name, []).append(entry)
    return {name: np.array(of_name, dtype=kinds).view(np.recarray) for name, of_name in entries.items()}


@dataclass(frozen=True)
class Means:
    """Means over responses with 95 % intervals, each float64 (K,); NaN where there is nothing, or too little."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: int


def means(values: np.ndarray) -> np.ndarray:
    """Of each column of (N, K) the mean of what is finite, float64 (K,); NaN where nothing is."""
    known = np.isfinite(values)
    count, sums = known.sum(axis=0), np.where(known, values, 0.0).sum(axis=0)
    return np.divide(sums, count, out=np.full(values.shape[1], np.nan), where=count > 0)


def student_95(degrees: np.ndarray) -> np.ndarray:
    """Where 95 % of Student's t distribution is on both sides of 0, for integer degrees of freedom (K,); 12.7 for 1, 2.09 for
    19; NaN below 1.

    With ``t = sqrt(d) tan(a)`` its density is proportional to ``cos(a) ** (d - 1)`` over the angles from 0 to a right one.
    """
    angles = np.linspace(0.0, np.pi / 2, 20_001)
    found = np.full(len(degrees), np.nan)
    for degree in np.unique(degrees[degrees >= 1]):
        density = np.cos(angles) ** (degree - 1)
        mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
        found[degrees == degree] = np.sqrt(degree) * np.tan(np.interp(0.95 * mass[-1], mass, angles))
    return found


def clustered_means(values: np.ndarray, groups: np.ndarray) -> Means:
    """Means over responses, of which those to one prompt are not independent of each other.

    The interval is that of Student's t with G - 1 degrees of freedom and the cluster-robust variance of a mean,
    ``G / (G - 1) * sum_g (sum_(i in g) (x_i - mean))^2 / n^2`` (Cameron and Miller 2015, "A practitioner's guide to
    cluster-robust inference", sections II and VI.D), over the n responses and G prompts that have a value. Fewer than
    :data:`FEWEST` prompts have none.

    Args:
        values: float (N, K), NaN where there is none.
        groups: int (N,).
    """
    known = np.isfinite(values)
    count, mean = known.sum(axis=0), means(values)
    _, place = np.unique(groups, return_inverse=True)
    n_groups = int(place.max()) + 1 if len(place) else 0
    residuals, present = np.zeros((n_groups, values.shape[1])), np.zeros((n_groups, values.shape[1]), dtype=bool)
    np.add.at(residuals, place, np.where(known, values - mean, 0.0))
    np.logical_or.at(present, place, known)
    clusters = present.sum(axis=0)
    scale = np.divide(clusters, clusters - 1.0, out=np.full(len(mean), np.nan), where=clusters >= FEWEST)
    width = student_95(clusters - 1) * np.sqrt(scale * np.square(residuals).sum(axis=0)) / np.maximum(count, 1)
    return Means(mean, mean - width, mean + width, len(values))


def profiles(table: RowTable) -> dict[str, Means]:
    """Means over the responses with scores by outcome, where there are any: ``right``, ``wrong``, or an empty text for
    responses whose outcome is not known, which count only where no response has one."""
    scored = table[table.scored & np.isfinite(table.profile).any(axis=1)]
    found = {}
    for outcome in [outcome for outcome in OUTCOMES if (scored.outcome == outcome).any()] or [""]:
        chosen = scored[scored.outcome == outcome]
        if len(chosen):
            found[outcome] = clustered_means(chosen.profile, chosen.group)
    return found


def by_step(table: RowTable, outcome: str) -> tuple[list[int], np.ndarray]:
    """Mean weight of the reasoning by step and position, over the responses with scores and one outcome.

    Returns:
        The steps of the dump, and means float64 (S, K), NaN where there is no response.
    """
    steps = np.unique(table.step).tolist()
    chosen = table[table.scored & (table.outcome == outcome)]
    parts = [chosen.profile[chosen.step == step] for step in steps]
    return steps, np.array([means(part) for part in parts], dtype=np.float64).reshape(
        len(steps), table.profile.shape[1]
    )
