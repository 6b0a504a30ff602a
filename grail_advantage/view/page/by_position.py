"""Mean weights by position in the reasoning, over the rollouts of a token dump. Nothing here draws.

Shape suffixes: N rows of the dump, K bins of positions, S steps, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grail_advantage.view.dump.files import DumpRow

BINS = 20
OUTCOMES = ("right", "wrong")
_NORMAL_95 = 1.959963984540054


def reasoning(row: DumpRow) -> np.ndarray:
    """The tokens that train and come before the answer, bool (T,); all that train where there is no answer."""
    if row.span is None:
        return row.mask_T
    return row.mask_T & (np.arange(len(row)) < row.span.start)


def positions(count: int, bins: int) -> np.ndarray:
    """The bin of each of ``count`` tokens, int (count,): token ``i`` is at ``(i + 1/2) / count`` of the way."""
    return (np.arange(count) * 2 + 1) * bins // (2 * max(1, count))


def binned(values: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Means of consecutive values in bins of equal width of their positions, float64 (bins,).

    NaN values count nowhere; a bin without a value is NaN.
    """
    known = np.isfinite(values)
    place = positions(len(values), bins)[known]
    sums = np.bincount(place, weights=values[known].astype(np.float64), minlength=bins)
    counts = np.bincount(place, minlength=bins)
    return np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)


@dataclass(frozen=True)
class RowTable:
    """The values of a dump's rows that figures need, one entry a row."""

    steps: np.ndarray
    """int (N,)."""
    groups: np.ndarray
    """int (N,): rows with the same number answer the same prompt in the same update, unlike a dump's own numbers."""
    outcomes: np.ndarray
    """(N,): ``right``, ``wrong`` or an empty text."""
    scored: np.ndarray
    """bool (N,): the row has scores, so that its weights are the method's."""
    profiles: np.ndarray
    """float64 (N, K): mean weight of the reasoning by position, NaN in bins without a token."""

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, chosen: np.ndarray) -> RowTable:
        """The rows that a bool (N,) or indices choose."""
        return replace(self, **{name: values[chosen] for name, values in vars(self).items()})


def row_table(rows: Iterable[DumpRow], bins: int = BINS, method: str | None = None) -> RowTable:
    """Take rows in, one at a time.

    Args:
        rows: of a dump.
        bins: K.
        method: of rows that several methods weighed, which one's weights; by default the row's own.
    """
    steps: list[int] = []
    numbers: list[int] = []
    outcomes: list[str] = []
    scored: list[bool] = []
    profiles: list[np.ndarray] = []
    groups: dict[tuple[int, int, int], int] = {}
    for row in rows:
        columns = row.methods.get(method) if method is not None else None
        if method is not None and row.methods and columns is None:
            continue
        source = columns or row
        steps.append(row.step)
        numbers.append(groups.setdefault((row.step, row.update, row.group), len(groups)))
        outcomes.append(row.outcome or "")
        scored.append(source.neutral is None)
        profiles.append(binned(source.weight_T[reasoning(row)], bins))
    return RowTable(
        steps=np.array(steps, dtype=int),
        groups=np.array(numbers, dtype=int),
        outcomes=np.array(outcomes, dtype=str),
        scored=np.array(scored, dtype=bool),
        profiles=np.array(profiles, dtype=np.float64).reshape(len(profiles), bins),
    )


@dataclass(frozen=True)
class Means:
    """Means over rows with 95 % intervals, each float64 (K,); NaN where there is nothing."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: int
    groups: int
    """Prompts that the rows answer."""


def clustered_means(values: np.ndarray, groups: np.ndarray) -> Means:
    """Means over rows, whose rows of one prompt are not independent of each other.

    The interval is the normal one with the cluster-robust variance of a mean,
    ``G / (G - 1) * sum_g (sum_(i in g) (x_i - mean))^2 / n^2`` (Cameron and Miller 2015, "A practitioner's guide to
    cluster-robust inference", section II), over the n rows and G prompts that have a value.

    Args:
        values: float (N, K), NaN where there is none.
        groups: int (N,).
    """
    known = np.isfinite(values)
    count = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    mean = np.divide(sums, count, out=np.full(values.shape[1], np.nan), where=count > 0)
    _, place = np.unique(groups, return_inverse=True)
    n_groups = int(place.max()) + 1 if len(place) else 0
    residuals, present = np.zeros((n_groups, values.shape[1])), np.zeros((n_groups, values.shape[1]), dtype=bool)
    np.add.at(residuals, place, np.where(known, values - mean, 0.0))
    np.logical_or.at(present, place, known)
    clusters = present.sum(axis=0)
    scale = np.divide(clusters, clusters - 1.0, out=np.full(len(mean), np.nan), where=clusters > 1)
    width = _NORMAL_95 * np.sqrt(scale * np.square(residuals).sum(axis=0)) / np.maximum(count, 1)
    return Means(mean, mean - width, mean + width, len(values), n_groups)


@dataclass(frozen=True)
class Profile:
    """The positional profile of weights of some rows."""

    outcome: str
    """``right``, ``wrong`` or, of rows whose outcome is not known, an empty text."""
    first_step: int
    last_step: int
    means: Means


def thirds(steps: Iterable[int], parts: int = 3) -> list[list[int]]:
    """Steps in consecutive parts of as equal number as possible; fewer parts where there are fewer steps."""
    known = sorted(set(steps))
    parts = min(parts, len(known))
    return [known[len(known) * i // parts : len(known) * (i + 1) // parts] for i in range(parts)]


def profiles(table: RowTable, parts: int = 3) -> list[Profile]:
    """Profiles of the rows with scores, by part of the training and outcome; those without rows are left out."""
    parted = []
    scored = table.where(table.scored)
    for part in thirds(table.steps.tolist(), parts):
        for outcome in (*OUTCOMES, ""):
            chosen = scored.where(np.isin(scored.steps, part) & (scored.outcomes == outcome))
            if len(chosen):
                means = clustered_means(chosen.profiles, chosen.groups)
                parted.append(Profile(outcome, part[0], part[-1], means))
    return parted


@dataclass(frozen=True)
class HeatMap:
    """Mean weight of the reasoning by step and position, over the rows with scores."""

    steps: Sequence[int]
    weights: np.ndarray
    """float64 (S, K), NaN where there is no row."""
    rows: Sequence[int]
    """Rows with scores, of each step."""


def heat_map(table: RowTable, outcome: str | None = None) -> HeatMap:
    """The map of all rows with scores, or of those with one outcome; a row a step of the dump."""
    steps = sorted(set(table.steps.tolist()))
    chosen = table.where(table.scored & (table.outcomes == outcome) if outcome is not None else table.scored)
    of_step = [chosen.profiles[chosen.steps == step] for step in steps]
    weights = [clustered_means(part, np.arange(len(part))).mean for part in of_step]
    bins = table.profiles.shape[1]
    return HeatMap(steps, np.array(weights, dtype=np.float64).reshape(len(steps), bins), [len(p) for p in of_step])
