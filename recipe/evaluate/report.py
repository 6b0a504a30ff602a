"""Scored samples, figures over problems with their 95 % intervals, the comparison of two runs, and their pages.

Intervals are a percentile bootstrap over problems: a resample draws as many problems as a benchmark has, with replacement; the
samples of a problem stay together, since they depend on each other. Each benchmark has a random generator of its own, so that
its interval does not depend on which others are evaluated. Comparing two runs takes the same resamples for both, so that a
problem's difficulty drops out of the difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grail_advantage.dump.whole_file import write_whole
from recipe.evaluate.store import KEY
from recipe.hashing import digest
from recipe.marked_text import table
from recipe.reward import compute_score

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0
METRICS = ("acc", "pass", "tokens", "unanswered", "truncated")
"""Columns of :func:`by_problem`; ``acc`` is reported as acc@k and ``pass`` as pass@k, k the number of samples."""
PUBLISHED = {
    "source": "GRAIL minus GRPO as published (arXiv 2606.04889), mean over five models and six benchmarks",
    "samples": 3,
    "acc": 0.0360,
    "pass": 0.0305,
}
"""The only published figures, as shares; nothing is known of single models or benchmarks."""
# Differences of means are sums of fractions, so that equal runs may differ by rounding.
_ROUNDING = 1e-9


def judge(samples: pd.DataFrame) -> pd.DataFrame:
    """Score samples by :func:`recipe.reward.compute_score`, as in training; a row a sample.

    ``answered``: there is a complete box; ``answer`` is its text, shortened, for people. ``no_verdict``: the verifier cannot
    read the answer, or not within its limits; the sample counts as incorrect.
    """
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        columns = (samples[name] for name in ("benchmark", "text", "gold"))
        verdicts = pd.DataFrame(executor.map(compute_score, *columns), index=samples.index)
    return samples[[*KEY, "tokens", "gold"]].assign(
        right=verdicts["score"] == 1,
        answered=verdicts["answer_found"] == 1,
        no_verdict=verdicts["verify_failed"] == 1,
        truncated=samples["finish_reason"] == "length",
        answer=verdicts["pred"],
    )


def by_problem(scores: pd.DataFrame) -> pd.DataFrame:
    """The :data:`METRICS` of each problem's samples, by ``benchmark`` and ``index``: shares, but for ``tokens``, a mean."""
    scores = scores.assign(acc=scores["right"], unanswered=~scores["answered"])
    means = scores.groupby(["benchmark", "index"], sort=False)[["acc", "tokens", "unanswered", "truncated"]].mean()
    return means.assign(**{"pass": means["acc"] > 0})[list(METRICS)].astype(float)


def resample_counts(benchmark: str, problems: int) -> np.ndarray:
    """How often each problem is in each resample: (resamples, problems) int64, every row sums to ``problems``."""
    key = int.from_bytes(hashlib.sha256(benchmark.encode()).digest()[:8], "big")
    return np.random.default_rng([SEED, key]).multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)


def figures(problems: pd.DataFrame, samples: int) -> dict[str, Any]:
    """Value and interval (``low``, ``high``) of every metric, and in how many of the resamples it is ``above_zero``.

    Args:
        problems: as :func:`by_problem` gives them, or their differences.
        samples: of a problem.

    Returns:
        ``benchmarks`` (by name, with the number of ``problems``), ``mean`` over benchmarks and ``weighted_mean`` by problems.
    """
    names = [f"{name}@{samples}" if name in ("acc", "pass") else name for name in METRICS]

    def of_means(means: np.ndarray) -> dict[str, dict[str, float]]:
        low, high = np.quantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        rows = {"value": means[0], "low": low, "high": high, "above_zero": (means[1:] > _ROUNDING).mean(axis=0)}
        return pd.DataFrame(rows, index=names).T.to_dict()

    tables = dict(list(problems.groupby(level="benchmark", sort=False)))
    # The first row of each is the figure itself, the others are those of the resamples.
    means = {
        name: np.vstack([table.mean(), resample_counts(name, len(table)) @ table.to_numpy() / len(table)])
        for name, table in tables.items()
    }
    stacked, sizes = np.stack(list(means.values())), [len(table) for table in tables.values()]
    return {
        "benchmarks": {name: {"problems": len(tables[name]), **of_means(each)} for name, each in means.items()},
        "mean": of_means(stacked.mean(axis=0)),
        "weighted_mean": of_means(np.average(stacked, axis=0, weights=sizes)),
    }


def summarise(run: Mapping[str, Any], problems: pd.DataFrame, scores: pd.DataFrame) -> dict[str, Any]:
    """The content of ``results.json``: ``run``, ``interval`` and the figures, in all and by problem.

    Accuracies and rates are shares from 0 to 1.
    """
    tables = by_problem(scores)
    result = figures(tables, run["sampling"]["samples"])
    for name, found in result["benchmarks"].items():
        of_name, asked = scores[scores["benchmark"] == name], problems[problems["benchmark"] == name]
        found["unanswered"]["count"] = int((~of_name["answered"]).sum())
        found["truncated"]["count"] = int(of_name["truncated"].sum())
        found |= {"responses": len(of_name), "no_verdict": int(of_name["no_verdict"].sum())}
        found |= {"problems_hash": digest(asked["messages"].tolist()), "gold_hash": digest(asked["gold"].tolist())}
        found["by_problem"] = tables.loc[name].to_dict("list")
    return {"run": dict(run), "interval": _interval("percentile bootstrap over problems"), **result}


def _interval(method: str) -> dict[str, Any]:
    return {"level": LEVEL, "method": method, "resamples": RESAMPLES, "seed": SEED}


def load_run(folder: Path) -> dict[str, Any]:
    """Read ``results.json``, with its ``folder``; ValueError where there is none that can be read."""
    try:
        result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        again = f"run the evaluation (again) with --output-dir {folder}, it keeps its generations"
        raise ValueError(f"--compare {folder} has no results.json that can be read ({error}); {again}") from None
    return {**result, "folder": str(folder)}


def _tables(result: Mapping[str, Any]) -> pd.DataFrame:
    tables = {name: pd.DataFrame(found["by_problem"]) for name, found in result["benchmarks"].items()}
    return pd.concat(tables, names=["benchmark", "index"])


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of both runs and ``second - first`` with intervals, for each benchmark and both means.

    Raises:
        ValueError: the runs' benchmarks, problems, ground truths, prompt template or sampling differ; the message names every
            difference.
    """
    a, b = _conditions(first), _conditions(second)
    if names := [name for name in {**a, **b} if a.get(name) != b.get(name)]:
        differences = "; ".join(f"{name} {a.get(name)!r} and {b.get(name)!r}" for name in names)
        raise ValueError(
            f"--compare {first['folder']} {second['folder']}: these runs cannot be compared: {differences}; "
            "evaluate both with the same data, chat template and options"
        )
    result = figures(_tables(second) - _tables(first), first["run"]["sampling"]["samples"])
    runs = {"first": first, "second": second}
    for key, run in runs.items():
        of_run = dict(_rows(run))
        for label, row in _rows(result):
            for name in row.keys() - {"problems"}:
                row[name][key] = of_run[label][name]["value"]
    result |= {key: {"folder": run["folder"], "run": run["run"]} for key, run in runs.items()}
    return result | {"interval": _interval("paired percentile bootstrap over problems"), "published": PUBLISHED}


def _conditions(run: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in which two runs must agree, by its name in messages: all but the seed of the sampling, which changes the
    samples but not their distribution."""
    conditions = {name: value for name, value in run["run"]["sampling"].items() if name != "seed"}
    conditions |= {f"template.{name}": value for name, value in run["run"]["template"].items()}
    for name, result in run["benchmarks"].items():
        conditions |= {f"{name}.{key}": result[key] for key in ("problems", "problems_hash", "gold_hash")}
    return conditions


def _rows(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Label and figures of every row of a table: the benchmarks, then the means."""
    means = [("mean over benchmarks", result["mean"]), ("mean weighted by problems", result["weighted_mean"])]
    return [*result["benchmarks"].items(), *means]


def _describe(run: Mapping[str, Any]) -> str:
    """One line on how the responses were drawn."""
    template = {name: run["template"][name] for name in ("chat_template", "enable_thinking")}
    settings = {**run["sampling"], **template, "engine": run["engine"]}
    return f"{', '.join(f'{name} {value}' for name, value in settings.items())}."


def _number(figure: Mapping[str, float], form: str, scale: float = 1) -> str:
    """``VALUE [LOW, HIGH]``."""
    value, low, high = (format(scale * figure[key], form) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def results_page(result: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    samples = result["run"]["sampling"]["samples"]
    acc, passed = f"acc@{samples}", f"pass@{samples}"
    head = ["benchmark", "problems", f"{acc}, %", f"{passed}, %", "mean tokens", "unanswered, %", "truncated, %"]
    rows = []
    for label, found in _rows(result):
        shares = [_number(found[name], ".1f", 100) for name in (acc, passed, "unanswered", "truncated")]
        rows.append([label, found.get("problems", ""), *shares[:2], _number(found["tokens"], ".0f"), *shares[2:]])
    lines = [
        *(f"# Evaluation of `{result['run']['model']}`", "", *table(head, rows, right=1), ""),
        f"- {_describe(result['run'])}",
        f"- {acc}: mean over samples; {passed}: any sample correct; tokens with the end token; unanswered: no complete "
        "`\\boxed{}`; truncated: stopped by the limit on tokens.",
        f"- In brackets: {LEVEL:.0%} intervals, {result['interval']['method']}, {RESAMPLES} resamples. Problems that all fare "
        "alike give an interval without width; that is no certainty.",
    ]
    if failed := sum(found["no_verdict"] for found in result["benchmarks"].values()):
        lines.append(f"- {failed} answers could not be read, or not within the limits, and count as incorrect.")
    return "\n".join(lines) + "\n"


def comparison_page(result: Mapping[str, Any]) -> str:
    """The comparison as a Markdown page."""
    runs, samples = {"A": result["first"], "B": result["second"]}, result["first"]["run"]["sampling"]["samples"]
    published = samples == PUBLISHED["samples"]
    lines = [
        "# B compared with A",
        "",
        *(f"- {a}: `{run['run']['model']}` (`{run['folder']}`)" for a, run in runs.items()),
    ]
    shares = (100, ".1f", "+z.2f", ("A, %", "B, %", "B - A, points"))
    for metric, heading, (scale, form, change, columns) in (
        ("acc", f"acc@{samples}", shares),
        ("pass", f"pass@{samples}", shares),
        ("tokens", "mean tokens", (1, ".0f", "+z.0f", ("A", "B", "B - A"))),
    ):
        rows = []
        for label, row in _rows(result):
            figure = row[metric if metric == "tokens" else heading]
            both = [format(scale * figure[key], form) for key in ("first", "second")]
            rows.append(
                [label, row.get("problems", ""), *both, _number(figure, change, scale), f"{figure['above_zero']:.1%}"]
            )
        if published and metric in PUBLISHED:
            rows.append(["*published, GRAIL - GRPO*", "", "", "", f"*{100 * PUBLISHED[metric]:+.2f}*", ""])
        lines += ["", *table([heading, "problems", *columns, "above 0"], rows, right=1)]
    lines += ["", *(f"- {a}: {_describe(run['run'])}" for a, run in runs.items())]
    if published:
        lines.append(f"- *published*: {PUBLISHED['source']}; single models and benchmarks are not known.")
    lines.append(
        f"- In brackets: {LEVEL:.0%} intervals, {result['interval']['method']}, {RESAMPLES} resamples; above 0: the share of "
        "them in which B is above A."
    )
    return "\n".join(lines) + "\n"


def write_report(result: Mapping[str, Any], output_dir: Path, name: str, page: str) -> None:
    """Write ``NAME.md`` and ``NAME.json``."""
    write_whole(output_dir / f"{name}.md", page)
    write_whole(output_dir / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
