"""Is a step blamed? Within a response, by the AUROC of the step's mean blame against that of its other steps, ties counting
half.

A token's blame is ``-A_t``: a method that gives an error a large *positive* advantage finds nothing. Tokens of the answer
and after it are left out, as many methods give these a weight of their own. Beside a figure are its controls: the
response's own blame shuffled among the tokens that the method scored, the mean blame of each token's kind in place of its
own, and the same step of other solutions, at the same relative place (:mod:`bench.table`).

Shape suffixes: T response tokens, N compared tokens, M steps.
"""

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from grail_advantage.dump import DumpRow, read_dump

SHUFFLES = 20


class Label(NamedTuple):
    """A response by steps, and the step that should be blamed."""

    # Int; the step of each token, -1 for those that are not compared
    step_T: np.ndarray
    # A word for the kind of each token
    kind_T: np.ndarray
    # None: no step
    step: int | None = None


class TokenAdvantages(NamedTuple):
    """A method's advantages in a response."""

    advantage_T: np.ndarray
    # Bool; the tokens that it scored
    scored_T: np.ndarray | bool = True
    no_scores: str | None = None


class Record(NamedTuple):
    """How a method blames a response's steps; the last four are NaN without a step to blame."""

    problem: int
    no_scores: str | None
    # Of each step, as if it were the one
    auroc_M: np.ndarray
    # Of the label's step: 0 for the first, 1 for the last
    place: float = math.nan
    auroc: float = math.nan
    # In place of the AUROC, by controls
    shuffled: float = math.nan
    kinds: float = math.nan


def rows_of(folder: Path) -> list[DumpRow]:
    """The responses of a folder. ValueError: one of its files cannot be read, or two have one id."""
    dump = read_dump(folder)
    rows = list(dump)
    if dump.problems:
        raise ValueError(f"{folder}: {'; '.join(dump.problems)}")
    for key, count in Counter(row.key for row in rows).items():
        if count > 1:
            raise ValueError(f"{folder}: two responses have the id {key}; give each its own")
    return rows


def by_step(blame_T: np.ndarray, label: Label) -> np.ndarray:
    """AUROC of each step, (M,)."""
    compared_T = label.step_T >= 0
    step_N = label.step_T[compared_T]
    means_M = np.bincount(step_N, blame_T[compared_T]) / np.bincount(step_N)
    # Equal values have means that differ by rounding.
    means_M = np.round(means_M / (np.abs(means_M).max() or 1), 9)
    # Means 2, 5, 5 have the ranks 1, 2.5, 2.5: above 0, 1.5 and 1.5 of the two others.
    return (stats.rankdata(means_M) - 1) / (len(means_M) - 1)


def record_of(row: DumpRow, advantages: TokenAdvantages, label: Label, number: int) -> Record:
    """A method's record; ``number`` of the response, from which the random numbers of the shuffles follow."""
    blame_T = -advantages.advantage_T
    auroc_M = by_step(blame_T, label)
    record = Record(row.group, advantages.no_scores, auroc_M)
    if label.step is None:
        return record
    # By the response's number, so that every method is shuffled alike.
    generator = np.random.default_rng([number, 5])
    compared_T = label.step_T >= 0
    # Tokens without a score have a weight by rule, such as 1, which shuffling must not spread.
    moved_T = advantages.scored_T & compared_T
    shuffled = []
    for _ in range(SHUFFLES):
        order = np.argsort(generator.random(len(blame_T))[moved_T])
        shuffled_T = blame_T.copy()
        shuffled_T[moved_T] = blame_T[moved_T][order]
        shuffled.append(by_step(shuffled_T, label)[label.step])
    by_kind = pd.Series(blame_T).where(compared_T).groupby(label.kind_T)
    return record._replace(
        place=label.step / (len(auroc_M) - 1),
        auroc=auroc_M[label.step],
        shuffled=np.mean(shuffled),
        kinds=by_step(by_kind.transform("mean"), label)[label.step],
    )


def token_advantages(row: DumpRow) -> dict[str, TokenAdvantages]:
    """Those of each method, by its name."""
    by_method = {}
    for name, of_method in row.methods.items():
        advantage_T = of_method.advantage_T
        scored_T = of_method.no_scores is None
        # A method of weights; the others give advantages, which have no scores.
        if advantage_T is None:
            advantage_T = of_method.weight_T * row.base_advantage_T
            if of_method.score_T is not None:
                scored_T = scored_T & np.isfinite(of_method.score_T)
        by_method[name] = TokenAdvantages(advantage_T.astype(float), scored_T, of_method.no_scores)
    return by_method
