"""Is a step blamed? Within a response, by the AUROC of the step's mean blame against that of its other steps, ties counting
half.

A token's blame is ``-A_t``: a method that gives an error a large *positive* advantage finds nothing. Tokens of the answer
and after it are left out, as many methods give these a weight of their own. Beside a figure are its controls: the
response's own blame shuffled among the tokens that the method scored, the mean blame of each token's kind in place of its
own, and the same step of other solutions, at the same relative place (:mod:`bench.table`).

Shape suffixes: T response tokens, N compared tokens, M steps, S shuffles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grail_advantage.dump import DumpRow

SHUFFLES = 20


@dataclass(frozen=True)
class Label:
    """A response by steps, and the step that should be blamed."""

    step_T: np.ndarray  # int; the step of each token, -1 for those that are not compared
    kind_T: np.ndarray  # int; tokens of one kind have the same number
    step: int | None = None  # None: no step


@dataclass(frozen=True)
class TokenAdvantages:
    """A method's advantages in a response."""

    advantage_T: np.ndarray
    scored_T: np.ndarray  # bool; the tokens that it scored
    no_scores: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """How a method blames a response's steps."""

    id: Any
    problem: Any
    no_scores: str | None
    step: int | None  # that of the label
    auroc_M: np.ndarray  # of each step, as if it were the one
    shuffled: float = math.nan  # of the label's step by its controls
    kinds: float = math.nan


def among(label: Label, compared_T: np.ndarray) -> Label | None:
    """A label with the steps numbered anew among the compared tokens; ``None`` where fewer than two are left, or not the
    one that should be blamed."""
    steps = np.unique(label.step_T[compared_T])
    if len(steps) < 2 or (label.step is not None and label.step not in steps):
        return None
    step_T = np.where(compared_T, np.searchsorted(steps, label.step_T), -1)
    if label.step is None:
        return replace(label, step_T=step_T)
    return replace(label, step_T=step_T, step=int(np.searchsorted(steps, label.step)))


def step_means(values_T: np.ndarray, step_T: np.ndarray) -> np.ndarray:
    """Mean value of each step, (M,), over the tokens with a step from 0 on."""
    compared_T = step_T >= 0
    return np.bincount(step_T[compared_T], values_T[compared_T]) / np.bincount(step_T[compared_T])


def by_step(blame_T: np.ndarray, label: Label) -> np.ndarray:
    """AUROC of each step, (M,)."""
    means_M = step_means(blame_T, label.step_T)
    # Equal values have means that differ by rounding
    means_M = np.round(means_M / (np.abs(means_M).max() or 1), 9)
    above_MM = np.sign(means_M[:, None] - means_M) / 2 + 0.5
    # A step and itself are a tie, 0.5, which is no comparison.
    return (above_MM.sum(axis=1) - 0.5) / (len(means_M) - 1)


def record_of(
    id: Any, problem: Any, advantages: TokenAdvantages, label: Label, number: int
) -> Record:
    """A method's record; ``number`` of the response, from which the random numbers of the shuffles follow."""
    blame_T = -advantages.advantage_T
    auroc_M = by_step(blame_T, label)
    about = Record(
        id=id, problem=problem, no_scores=advantages.no_scores, step=label.step, auroc_M=auroc_M
    )
    if label.step is None:
        return about
    # By the response's number, so that every method is shuffled alike.
    generator = np.random.default_rng([number, 5])
    compared_T = label.step_T >= 0
    # Tokens without a score have a weight by rule, such as 1, which shuffling must not spread.
    moved_T = advantages.scored_T & compared_T
    shuffled_S = np.zeros(SHUFFLES)
    for shuffle in range(SHUFFLES):
        order = np.argsort(generator.random(len(blame_T)))
        shuffled_T = blame_T.copy()
        shuffled_T[moved_T] = blame_T[order[moved_T[order]]]
        shuffled_S[shuffle] = by_step(shuffled_T, label)[label.step]
    kinds_T = blame_T.copy()
    for kind in np.unique(label.kind_T[compared_T]):
        alike_T = compared_T & (label.kind_T == kind)
        kinds_T[alike_T] = blame_T[alike_T].mean()
    return replace(
        about, shuffled=float(shuffled_S.mean()), kinds=float(by_step(kinds_T, label)[label.step])
    )


def token_advantages(row: DumpRow) -> dict[str, TokenAdvantages]:
    """Those of each method, by its name."""
    by_method = {}
    for name, of_method in row.methods.items():
        scored_T = np.ones(len(row), dtype=bool)
        advantage_T = of_method.advantage_T
        if advantage_T is None:
            advantage_T = of_method.weight_T * row.base_advantage_T
            if of_method.score_T is not None:
                scored_T = np.isfinite(of_method.score_T)
        scored_T = scored_T & (of_method.no_scores is None)
        by_method[name] = TokenAdvantages(advantage_T.astype(float), scored_T, of_method.no_scores)
    return by_method
