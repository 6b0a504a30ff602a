"""Two runs side by side: differences with a paired bootstrap over problems.

Both runs are resampled with the same problems, so that a problem's difficulty drops out of the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from recipe.evaluate.report import LEVEL, RESAMPLES, describe_run, figures, interval, rows_of
from recipe.marked_text import table

PUBLISHED_SOURCE = "GRAIL minus GRPO as published (arXiv 2606.04889), mean over five models and six benchmarks"
PUBLISHED_DIFFERENCES = {"acc": 0.0360, "pass": 0.0305}
"""The only published figures, as shares; nothing is known of single models or benchmarks."""
_PUBLISHED_SAMPLES = 3


def load_run(folder: Path) -> dict[str, Any]:
    """Read ``results.json``, with its ``folder``; ValueError where it is not there or damaged."""
    try:
        report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        describe_run(report["run"])
        if any(len(table) != report["benchmarks"][name]["problems"] for name, table in _tables(report).items()):
            raise ValueError("problems are missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        again = f"run the evaluation (again) with --output-dir {folder}, it keeps its generations"
        raise ValueError(f"--compare {folder} has no results.json that is whole ({error!r}); {again}") from None
    return {**report, "folder": str(folder)}


def _tables(report: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    return {name: pd.DataFrame(found["by_problem"]) for name, found in report["benchmarks"].items()}


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of both runs and ``second - first`` with intervals, for each benchmark and both means.

    Raises:
        ValueError: the runs' benchmarks, problems, gold answers, prompt template or sampling differ; the message names every
            difference.
    """
    _check_comparable(first, second)
    before, after = _tables(first), _tables(second)
    tables = {name: after[name] - before[name] for name in before}
    result = figures(tables, first["run"]["sampling"]["samples"])
    for key, run in (("first", first), ("second", second)):
        of_run = dict(rows_of(run))
        for label, row in rows_of(result):
            for name in row.keys() - {"problems"}:
                row[name][key] = of_run[label][name]["value"]
    return {
        "first": {"folder": first["folder"], "run": first["run"]},
        "second": {"folder": second["folder"], "run": second["run"]},
        "interval": interval("paired percentile bootstrap over problems"),
        "published": {"source": PUBLISHED_SOURCE, "samples": _PUBLISHED_SAMPLES, **PUBLISHED_DIFFERENCES},
        **result,
    }


def _check_comparable(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    a, b = _conditions(first), _conditions(second)
    differing = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if differing:
        differences = [f"{name} {a.get(name)!r} and {b.get(name)!r}" for name in differing]
        raise ValueError(
            f"--compare {first['folder']} {second['folder']}: these runs cannot be compared: {'; '.join(differences)}; "
            "evaluate both with the same data, chat template and options"
        )


def _conditions(run: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in which two runs must agree, by its name in messages: all but the seed of the sampling, which changes the
    samples but not their distribution."""
    conditions = {name: value for name, value in run["run"]["sampling"].items() if name != "seed"}
    conditions |= {f"template.{name}": value for name, value in run["run"]["template"].items()}
    for name, result in run["benchmarks"].items():
        conditions |= {f"{name}.{key}": result[key] for key in ("problems", "problems_hash", "gold_hash")}
    return conditions


def markdown(result: Mapping[str, Any]) -> str:
    """The comparison as a Markdown page."""
    runs = [result[key]["run"] for key in ("first", "second")]
    samples = runs[0]["sampling"]["samples"]
    published = samples == _PUBLISHED_SAMPLES
    lines = ["# B compared with A", ""]
    for letter, key in (("A", "first"), ("B", "second")):
        lines.append(f"- {letter}: `{result[key]['run']['model']}` (`{result[key]['folder']}`)")
    for metric in ("acc", "pass", "tokens"):
        if metric == "tokens":
            scale, digits, name, head = 1, 0, metric, ("mean tokens", "problems", "A", "B", "B - A", "above 0")
        else:
            scale, digits, name = 100, 1, f"{metric}@{samples}"
            head = (name, "problems", "A, %", "B, %", "B - A, points", "above 0")
        rows = []
        for label, row in rows_of(result):
            first, second, *change = (scale * row[name][key] for key in ("first", "second", "value", "low", "high"))
            value, low, high = (_signed(figure, digits + (metric != "tokens")) for figure in change)
            cells = (label, row.get("problems", ""), f"{first:.{digits}f}", f"{second:.{digits}f}")
            rows.append((*cells, f"{value} [{low}, {high}]", f"{row[name]['above_zero']:.1%}"))
        if published and metric in PUBLISHED_DIFFERENCES:
            value = _signed(100 * PUBLISHED_DIFFERENCES[metric], 2)
            rows.append(("*published, GRAIL - GRPO*", "", "", "", f"*{value}*", ""))
        lines += ["", *table(head, rows, right=1)]
    lines.append("")
    if published:
        lines.append(f"- *published*: {PUBLISHED_SOURCE}; single models and benchmarks are not known.")
    sentences = [describe_run(run) for run in runs]
    if sentences[0] == sentences[1]:
        lines.append(f"- {sentences[0]}")
    else:
        lines += [f"- A: {sentences[0]}", f"- B: {sentences[1]}"]
    lines.append(
        f"- In brackets: {LEVEL:.0%} intervals, {result['interval']['method']}, {RESAMPLES} resamples; above 0: the share of "
        "them in which B is above A."
    )
    return "\n".join(lines) + "\n"


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.replace("-", "+") if float(text) == 0 else text
