"""Judged samples, and figures over problems with their 95 % intervals.

Intervals are a percentile bootstrap over problems: a resample draws as many problems as a benchmark has, with replacement; the
samples of a problem stay together, since they depend on each other. Each benchmark has a random generator of its own, so that
its interval does not depend on which others are evaluated. Comparing two runs takes the same resamples for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

from recipe.evaluate.problems import Benchmarks, Problem
from recipe.evaluate.store import Samples
from recipe.reward import compute_score

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0
MEANS = {"mean": "mean over benchmarks", "weighted_mean": "mean weighted by problems"}
METRICS = ("acc", "pass", "tokens", "unanswered", "truncated")
"""Columns of :func:`problem_tables`; ``acc`` is reported as acc@k and ``pass`` as pass@k, k the number of samples."""
# Differences of means are sums of fractions, so that equal runs may differ by rounding.
_ROUNDING = 1e-9


def judge(benchmarks: Benchmarks, generations: Mapping[str, Mapping[int, Samples]]) -> pd.DataFrame:
    """Judge every sample by :func:`recipe.reward.compute_score`, as in training; a row a sample.

    Columns: ``benchmark``, ``index``, ``id`` and ``gold`` of the problem, ``sample``, ``right``, ``answered`` (there is a
    complete box), ``no_verdict`` (a box that the judge could not judge within its limits; it counts as wrong), ``truncated``,
    ``tokens``, and ``answer``: the judged box, shortened, for people.
    """

    def rows(name: str, index: int, problem: Problem) -> list[dict[str, Any]]:
        found = []
        for number, sample in enumerate(generations[name][index]):
            verdict = compute_score(name, sample["text"], problem.gold)
            row = {"benchmark": name, "index": index, "id": problem.id, "gold": problem.gold, "sample": number}
            row |= {"right": verdict["score"] == 1.0, "answered": verdict["answer_found"] == 1.0}
            row |= {"no_verdict": verdict["verify_failed"] == 1.0, "truncated": sample["finish_reason"] == "length"}
            found.append(row | {"tokens": sample["tokens"], "answer": verdict["pred"]})
        return found

    problems = [(name, index, problem) for name, each in benchmarks.items() for index, problem in enumerate(each)]
    with ThreadPoolExecutor(8) as executor:  # the judge's own processes do the work
        return pd.DataFrame([row for found in executor.map(lambda each: rows(*each), problems) for row in found])


def problem_tables(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By benchmark, a row a problem with the :data:`METRICS` of its samples: shares, but for ``tokens``, a mean."""
    scores = scores.assign(acc=scores["right"], unanswered=~scores["answered"])
    means = scores.groupby(["benchmark", "index"], sort=False)[["acc", "tokens", "unanswered", "truncated"]].mean()
    means = means.assign(**{"pass": means["acc"] > 0})[list(METRICS)].astype(float)
    return {name: table.reset_index(drop=True) for name, table in means.groupby("benchmark", sort=False)}


def resample_counts(benchmark: str, problems: int) -> np.ndarray:
    """How often each problem is in each resample: (resamples, problems) int64, every row sums to ``problems``."""
    key = int.from_bytes(hashlib.sha256(benchmark.encode()).digest()[:8], "big")
    return np.random.default_rng([SEED, key]).multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)


def figures(tables: Mapping[str, pd.DataFrame], samples: int) -> dict[str, Any]:
    """Value and interval (``low``, ``high``) of every metric, and in how many of the resamples it is ``above_zero``.

    Returns:
        ``benchmarks`` (by name, with the number of ``problems``), ``mean`` over benchmarks and ``weighted_mean`` by problems.
    """
    sizes = [len(table) for table in tables.values()]
    # The first row of each is the figure itself, the others are those of the resamples.
    means = {
        name: np.vstack([table.mean(), resample_counts(name, len(table)) @ table.to_numpy() / len(table)])
        for name, table in tables.items()
    }
    stacked = np.stack(list(means.values()))
    result = {name: _figures(each, samples) for name, each in means.items()}
    return {
        "benchmarks": {name: {"problems": size, **result[name]} for name, size in zip(tables, sizes, strict=True)},
        "mean": _figures(stacked.mean(axis=0), samples),
        "weighted_mean": _figures(np.average(stacked, axis=0, weights=sizes), samples),
    }


def _figures(means: np.ndarray, samples: int) -> dict[str, dict[str, float]]:
    names = [f"{name}@{samples}" if name in ("acc", "pass") else name for name in METRICS]
    low, high = np.quantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    columns = zip(means[0], low, high, (means[1:] > _ROUNDING).mean(axis=0), strict=True)
    keys = ("value", "low", "high", "above_zero")
    return {name: dict(zip(keys, map(float, column), strict=True)) for name, column in zip(names, columns, strict=True)}
