"""Judged samples, figures over problems with their 95 % intervals, and ``results.json`` and ``results.md``.

Intervals are a percentile bootstrap over problems: a resample draws as many problems as a benchmark has, with replacement; the
samples of a problem stay together, since they depend on each other. Each benchmark has a random generator of its own, so that
its interval does not depend on which others are evaluated. Comparing two runs takes the same resamples for both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recipe.evaluate.problems import Benchmarks
from recipe.evaluate.store import KEY
from recipe.files import digest, write_text
from recipe.marked_text import table
from recipe.reward import compute_score

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0
MEANS = {"mean": "mean over benchmarks", "weighted_mean": "mean weighted by problems"}
METRICS = ("acc", "pass", "tokens", "unanswered", "truncated")
"""Columns of :func:`problem_tables`; ``acc`` is reported as acc@k and ``pass`` as pass@k, k the number of samples."""
# Differences of means are sums of fractions, so that equal runs may differ by rounding.
_ROUNDING = 1e-9


def judge(samples: Sequence[Mapping[str, Any]], benchmarks: Benchmarks) -> pd.DataFrame:
    """Judge samples by :func:`recipe.reward.compute_score`, as in training; a row a sample.

    ``answered``: there is a complete box; ``answer`` is its text, shortened, for people. ``no_verdict``: the judge could not
    judge it within its limits; it counts as wrong.
    """

    def row(sample: Mapping[str, Any]) -> dict[str, Any]:
        gold = benchmarks[sample["benchmark"]][sample["index"]].gold
        verdict = compute_score(sample["benchmark"], sample["text"], gold)
        return {name: sample[name] for name in (*KEY, "tokens")} | {
            "gold": gold,
            "right": verdict["score"] == 1.0,
            "answered": verdict["answer_found"] == 1.0,
            "no_verdict": verdict["verify_failed"] == 1.0,
            "truncated": sample["finish_reason"] == "length",
            "answer": verdict["pred"],
        }

    with ThreadPoolExecutor(8) as executor:  # the judge's own processes do the work
        return pd.DataFrame(executor.map(row, samples))


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
    # The first row of each is the figure itself, the others are those of the resamples.
    means = {
        name: np.vstack([table.mean(), resample_counts(name, len(table)) @ table.to_numpy() / len(table)])
        for name, table in tables.items()
    }
    stacked, sizes = np.stack(list(means.values())), [len(table) for table in tables.values()]
    return {
        "benchmarks": {
            name: {"problems": len(tables[name]), **_figures(each, samples)} for name, each in means.items()
        },
        "mean": _figures(stacked.mean(axis=0), samples),
        "weighted_mean": _figures(np.average(stacked, axis=0, weights=sizes), samples),
    }


def _figures(means: np.ndarray, samples: int) -> dict[str, dict[str, float]]:
    names = [f"{name}@{samples}" if name in ("acc", "pass") else name for name in METRICS]
    low, high = np.quantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    columns = zip(means[0], low, high, (means[1:] > _ROUNDING).mean(axis=0), strict=True)
    keys = ("value", "low", "high", "above_zero")
    return {name: dict(zip(keys, map(float, column), strict=True)) for name, column in zip(names, columns, strict=True)}


def summarise(run: Mapping[str, Any], benchmarks: Benchmarks, scores: pd.DataFrame) -> dict[str, Any]:
    """The content of ``results.json``: ``run``, ``interval`` and the figures, in all and by problem.

    Accuracies and rates are shares from 0 to 1.
    """
    tables = problem_tables(scores)
    result = figures(tables, run["sampling"]["samples"])
    for name, found in result["benchmarks"].items():
        rows = scores[scores["benchmark"] == name]
        found["unanswered"]["count"] = int((~rows["answered"]).sum())
        found["truncated"]["count"] = int(rows["truncated"].sum())
        found |= {"responses": len(rows), "no_verdict": int(rows["no_verdict"].sum())}
        found["problems_hash"] = digest([problem.messages for problem in benchmarks[name]])
        found["gold_hash"] = digest([problem.gold for problem in benchmarks[name]])
        found["by_problem"] = tables[name].to_dict("list")
    return {"run": dict(run), "interval": interval("percentile bootstrap over problems"), **result}


def interval(method: str) -> dict[str, Any]:
    return {"level": LEVEL, "method": method, "resamples": RESAMPLES, "seed": SEED}


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Label and figures of every row of a table: the benchmarks, then the means."""
    return [*result["benchmarks"].items(), *((label, result[key]) for key, label in MEANS.items())]


def describe_run(run: Mapping[str, Any]) -> str:
    """One sentence on how the responses were drawn."""
    sampling, template = run["sampling"], run["template"]
    return (
        f"{sampling['samples']} samples a problem, temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}, "
        f"top_k {sampling['top_k']}, at most {sampling['max_tokens']} tokens, seed {sampling['seed']}; chat template "
        f"{template['chat_template']}, enable_thinking={template['enable_thinking']}; {run['engine']}."
    )


def markdown(result: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    samples = result["run"]["sampling"]["samples"]
    acc, passed = f"acc@{samples}", f"pass@{samples}"
    head = ["benchmark", "problems", f"{acc}, %", f"{passed}, %", "mean tokens", "unanswered", "truncated"]
    rows = [
        (
            *(name, figures.get("problems", ""), _cell(figures[acc], 100, 1), _cell(figures[passed], 100, 1)),
            *(_cell(figures["tokens"], 1, 0), _rate(figures["unanswered"]), _rate(figures["truncated"])),
        )
        for name, figures in rows_of(result)
    ]
    lines = [
        *(f"# Evaluation of `{result['run']['model']}`", "", *table(head, rows, right=1), ""),
        f"- {describe_run(result['run'])}",
        f"- {acc}: mean over samples; {passed}: any sample right; tokens with the end token; unanswered: no complete "
        "`\\boxed{}`; truncated: stopped by the limit on tokens.",
        f"- In brackets: {LEVEL:.0%} intervals, {result['interval']['method']}, {RESAMPLES} resamples. Problems that all fare "
        "alike give an interval without width; that is no certainty.",
    ]
    if failed := sum(found["no_verdict"] for found in result["benchmarks"].values()):
        lines.append(f"- {failed} answers could not be judged within the limits and count as wrong.")
    return "\n".join(lines) + "\n"


def _cell(figure: Mapping[str, float], scale: float, digits: int, unit: str = "") -> str:
    value, low, high = (f"{scale * figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value}{unit} [{low}, {high}]"


def _rate(figure: Mapping[str, float]) -> str:
    text = _cell(figure, 100, 1, " %")
    return f"{figure['count']}: {text}" if "count" in figure else text


def write_report(result: Mapping[str, Any], output_dir: Path, name: str, text: str) -> None:
    """Write ``NAME.md`` and ``NAME.json``."""
    write_text(output_dir / f"{name}.md", text)
    write_text(output_dir / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
