"""Figures over problems with their 95 % intervals, the comparison of two runs, and their pages.

Intervals are a percentile bootstrap over problems, whose samples stay together. Each benchmark has a random generator
of its own, so that its interval does not depend on which others are evaluated. Two runs are compared on the same
resamples, so that a problem's difficulty drops out of the difference.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pandas as pd

from recipe.evaluate.grading import BOTH, by_problem
from recipe.hashing import digest
from recipe.marked_text import table

INTERVAL = {"level": 0.95, "method": "percentile bootstrap over problems", "resamples": 10_000, "seed": 0}


def resampled(name: str, problems: pd.DataFrame) -> np.ndarray:
    """Means of a benchmark's problems, a row a resample; the first row is the means themselves."""
    key, count = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"), len(problems)
    random = np.random.default_rng([INTERVAL["seed"], key])
    counts = random.multinomial(count, np.full(count, 1 / count), size=INTERVAL["resamples"])
    return np.vstack([problems.mean(), counts @ problems.to_numpy() / count])


def figures(problems: pd.DataFrame, samples: int) -> dict[str, Any]:
    """``value``, ``low``, ``high`` of every metric and the share of resamples ``above_zero``: of ``benchmarks`` by
    name, of their ``mean`` and of their ``weighted_mean``. ``problems`` is as :func:`by_problem` gives it, or a
    difference of two."""
    names = [re.sub("^(acc|pass)", rf"\1@{samples}", str(name)) for name in problems.columns]

    def of_means(means: np.ndarray) -> dict[str, Any]:
        low, high = np.quantile(means[1:], [0.025, 0.975], axis=0)
        # Differences of means are sums of fractions, so that equal runs may differ by rounding.
        rows = {"value": means[0], "low": low, "high": high, "above_zero": (means[1:] > 1e-9).mean(axis=0)}
        return pd.DataFrame(rows, index=names).T.to_dict()

    tables = dict(list(problems.groupby(level="benchmark", sort=False)))
    sizes = [len(of_name) for of_name in tables.values()]
    means = np.stack([resampled(name, of_name) for name, of_name in tables.items()])
    return {
        "benchmarks": {n: {"problems": size, **of_means(m)} for n, size, m in zip(tables, sizes, means, strict=True)},
        "mean": of_means(means.mean(axis=0)),
        "weighted_mean": of_means(np.average(means, axis=0, weights=sizes)),
    }


def summarise(run: dict[str, Any], hashes: dict[str, str], scores: pd.DataFrame) -> dict[str, Any]:
    """The content of ``results.json``: ``run``, the figures (shares from 0 to 1), and for every benchmark the hash of
    its problems and figures by problem. ``tokens_of_answered``: as the published code, over responses with a box."""
    tables = by_problem(scores)
    result = figures(tables, run["sampling"]["samples"])
    boxed = scores[scores["answered"]].groupby("benchmark")["tokens"].mean().reindex(result["benchmarks"])
    sizes = [row["problems"] for row in result["benchmarks"].values()]
    result["mean"]["tokens_of_answered"] = float(boxed.mean(skipna=False))
    result["weighted_mean"]["tokens_of_answered"] = float(np.average(boxed, weights=sizes))
    for name, row in result["benchmarks"].items():
        of_name = scores[scores["benchmark"] == name]
        row |= {"tokens_of_answered": float(boxed[name]), "responses": len(of_name)}
        for column in scores.columns.intersection(["no_verdict", "no_verdict_published"]):
            row[column.replace("_published", ", published")] = int(of_name[column].sum())
        row |= {"problems_hash": hashes[name], "by_problem": tables.loc[name].to_dict("list")}
        row["gold_hash"] = digest(of_name.drop_duplicates("index")["gold"].tolist())
    return {"run": run, "interval": INTERVAL, **result}


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The figures of ``second - first`` (contents of ``results.json``), beside both; ValueError names all differences
    of problems, ground truths, grader, prompt template and sampling but for its seed."""
    conditions, tables = [], []
    for result in (first, second):
        run, rows = result["run"], result["benchmarks"]
        hashes = {name: (row["problems_hash"], row["gold_hash"]) for name, row in rows.items()}
        conditions.append(hashes | run["sampling"] | run["template"] | {"grader": run["grader"], "seed": None})
        tables.append(pd.concat({n: pd.DataFrame(row["by_problem"]) for n, row in rows.items()}, names=["benchmark"]))
    a, b = conditions
    if differences := [
        f"{name} {a.get(name)!r} and {b.get(name)!r}" for name in {**a, **b} if a.get(name) != b.get(name)
    ]:
        remedy = "evaluate both with the same data, chat template and options; --regrade changes the grader"
        raise ValueError(f"these evaluations cannot be compared: {'; '.join(differences)}; {remedy}")
    return figures(tables[1] - tables[0], a["samples"]) | {"interval": INTERVAL, "first": first, "second": second}


def _table(result: dict[str, Any], sign: str = "") -> str:
    rows = []  # shares in percent; with a sign those of a difference
    means = {"mean over benchmarks": result["mean"], "mean weighted by problems": result["weighted_mean"]}
    names = [name for name, row in result["mean"].items() if isinstance(row, dict)]
    for label, row in (result["benchmarks"] | means).items():
        rows.append([label, row.get("problems", "")])
        for name in names:
            scale, digits = (1, 0) if name == "tokens" else (100, 2 if sign else 1)
            value, low, high = (f"{scale * row[name][key]:{sign}.{digits}f}" for key in ("value", "low", "high"))
            rows[-1].append(f"{value} [{low}, {high}]" + (f", {row[name]['above_zero']:.1%}" if sign else ""))
        rows[-1] += [] if sign else [f"{row['tokens_of_answered']:.0f}"]
    head = ["benchmark", "problems", *(name if name == "tokens" else f"{name}, %" for name in names)]
    return "\n".join(table(head + ([] if sign else ["tokens, with a box"]), rows, right=1)) + "\n"


def results_page(result: dict[str, Any]) -> str:
    """The report of a run as a Markdown page."""
    run = result["run"] | result["run"]["sampling"] | result["run"]["template"]
    settings = [f"{name} {value}" for name, value in run.items() if name not in ("sampling", "template", "prompt")]
    counts = pd.DataFrame(result["benchmarks"].values()).filter(like="no_verdict").sum()
    unreadable = ", ".join(f"{count:.0f}{name.removeprefix('no_verdict')}" for name, count in counts.items())
    return f"""# Evaluation of `{run["model"]}`

{_table(result)}
- acc: mean over samples; pass: any sample correct; tokens: mean over all responses, with the end token, and over those
  with a box alone, as GRAIL's published code counts (its box with `--grader published`); unanswered: no complete
  `\\boxed{{}}`; truncated: at the limit on tokens. Incorrect as unreadable: {unreadable}.
- In brackets: 95% intervals, bootstrap over problems. Problems that all fare alike give an interval without width.
- {", ".join(settings)}.
"""


def comparison_page(result: dict[str, Any]) -> str:
    """The comparison of two runs as a Markdown page, after the reports of both."""
    first, second = result["first"], result["second"]
    measures = {"published": "by this grader", BOTH: "by the grader of the columns `published`"}
    other = "**another measure than this table's**: by `--grader published`, or `both`"
    return f"""{results_page(first)}
{results_page(second)}
# B (`{second["folder"]}`) compared with A (`{first["folder"]}`)

{_table(result, "+z")}
- B - A; in brackets: 95% intervals, paired bootstrap over problems; then the share of resamples in which B is above A.
- Published for GRAIL - GRPO (arXiv 2606.04889), mean of five models and six benchmarks: acc@3 +3.60, pass@3 +3.05;
  {measures.get(first["run"]["grader"], other)}.
"""
