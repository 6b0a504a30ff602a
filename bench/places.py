"""Is the first wrong step blamed? Within each incorrect response with a known first error.

A token's blame is ``-A_t``: a method that gives the first error a large *positive* advantage finds nothing. Tokens of the
answer and after it are left out, as many methods give these a weight of their own. The figures of a step, ties counting
half:

- ``step``: AUROC of its mean blame against that of the response's other steps.
- ``hit``: whether no step is blamed more.
- ``after``: AUROC of the steps after it against the steps before it.

Beside a figure are its controls: the response's own blame shuffled among the tokens that the method scored; for ``step``,
the mean blame of each token's kind in place of its own; and the same step of correct solutions, at the same relative
place (:mod:`bench.table`).

Shape suffixes: T response tokens, N compared tokens, M steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SHUFFLES = 20
FIGURES = ("step", "hit", "after")


@dataclass(frozen=True)
class Label:
    """A response by steps, and its first error."""

    step_T: (
        np.ndarray
    )  # int; the step of each token, -1 for those that are not compared: the answer and what follows it
    kind_T: np.ndarray  # int; tokens of one kind have the same number
    step: int | None = None  # the first wrong step; None: the response is a correct one


def among(label: Label, compared_T: np.ndarray) -> Label | None:
    """A label with the steps numbered anew among the compared tokens; ``None`` where fewer than two are left, or not the
    first wrong one."""
    steps = np.unique(label.step_T[compared_T])
    if len(steps) < 2 or (label.step is not None and label.step not in steps):
        return None
    step_T = np.where(compared_T, np.searchsorted(steps, label.step_T), -1)
    return replace(label, step_T=step_T, step=None if label.step is None else int(np.searchsorted(steps, label.step)))


def step_means(values_N: np.ndarray, step_N: np.ndarray) -> np.ndarray:
    """Mean value of each step, (M,)."""
    return np.bincount(step_N, values_N) / np.bincount(step_N)


def by_step(values_T: np.ndarray, label: Label) -> dict[str, np.ndarray]:
    """The figures of every step of a response, (M,) each, as if it were the first wrong one; nan where there is nothing to
    compare."""
    compared_T = label.step_T >= 0
    values_N, step_N = values_T[compared_T], label.step_T[compared_T]
    means_M = step_means(values_N, step_N)
    means_M = np.round(means_M / (np.abs(means_M).max() or 1), 9)  # equal values have means that differ by rounding
    above_MM = np.sign(means_M[:, None] - means_M) / 2 + 0.5
    before_MM = np.tri(len(means_M), k=-1)  # of a step, those before it
    pairs_M = before_MM.sum(axis=0) * before_MM.sum(axis=1)
    most_M = means_M == means_M.max()
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "step": (above_MM.sum(axis=1) - 0.5) / (len(means_M) - 1),
            "hit": most_M / most_M.sum(),
            "after": np.einsum("am,mb,ab->m", before_MM, before_MM, above_MM) / pairs_M,
        }


def of_error(values_T: np.ndarray, label: Label) -> dict[str, float]:
    """The figures of the first wrong step of an incorrect response's blame (T,)."""
    return {name: float(values_M[label.step]) for name, values_M in by_step(values_T, label).items()}


def record(values_T: np.ndarray, moved_T: np.ndarray, label: Label, generator: np.random.Generator) -> dict[str, Any]:
    """A response's figures: of a correct one those of every step, of an incorrect one also those of its controls.

    Args:
        values_T: the blame.
        moved_T: bool; tokens that the method scored, among which the control shuffles.
        label: its steps and first error.
        generator: of the shuffles, the same for every method.
    """
    compared_T = label.step_T >= 0
    kept: dict[str, Any] = {"first": label.step, "steps": int(label.step_T.max()) + 1}
    if label.step is None:
        return kept | {"figures": by_step(values_T, label)}
    shuffles = []
    for _ in range(SHUFFLES):
        order = np.argsort(generator.random(len(values_T)))
        order = order[moved_T[order]]
        shuffled_T = values_T.copy()
        shuffled_T[moved_T] = values_T[order]
        shuffles.append(of_error(shuffled_T, label))
    kind_N = np.unique(label.kind_T[compared_T], return_inverse=True)[1]
    kind_means_T = values_T.copy()
    kind_means_T[compared_T] = step_means(values_T[compared_T], kind_N)[kind_N]
    figures = of_error(values_T, label)
    shuffled = {name: float(np.mean([one[name] for one in shuffles])) for name in figures}
    return kept | {"figures": figures, "shuffled": shuffled, "kinds": of_error(kind_means_T, label)["step"]}
