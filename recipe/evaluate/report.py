"""Samples graded, figures over problems with their 95 % intervals, and the comparison of two runs.

Intervals are a percentile bootstrap over problems, whose samples stay together. Each benchmark has its own generator,
whichever others are evaluated. Two runs have the same resamples: a problem's difficulty drops out of their difference.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from grail_advantage.reward import compute_score
from grail_advantage.text_io import table, visible
from recipe.evaluate.sampling import KEY, Count, Key, Record, checked, records

INTERVAL = {
    "level": 0.95,
    "method": "percentile bootstrap over problems",
    "resamples": 10_000,
    "seed": 0,
}


class Drawing(Record, extra="allow"):
    """The parameters with which samples were drawn."""

    samples: Annotated[int, Field(ge=1, le=10**6)]


class Run(Record, extra="allow"):
    """What an evaluation ran."""

    model: str
    sampling: Drawing
    grader: str | None = None


class Results(Record):
    """``results.json``, but for the figures, which follow from the scores."""

    run: Run


class Wanted(Key):
    """A line of ``scores.jsonl`` before it is graded."""

    gold: Any


class Score(Wanted):
    """A line of ``scores.jsonl``."""

    tokens: Count
    right: bool
    answered: bool
    no_verdict: bool
    truncated: bool
    right_published: bool | None = None
    no_verdict_published: bool | None = None


def read_scores(path: Path, kind: type[Wanted]) -> pd.DataFrame:
    """Returns what a file's lines hold of ``kind``; ValueError: a line is not of it, or there is none."""
    scores = []
    for number, record in enumerate(records(path), start=1):
        try:
            scores.append(checked(kind, record).model_dump(exclude_none=True))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not scores:
        raise ValueError("has no scores")
    return pd.DataFrame(scores).drop_duplicates(KEY, ignore_index=True)


def grade(samples: pd.DataFrame, grader: str) -> pd.DataFrame:
    """Grade samples (with ``gold``, the ground truth) as in training (``reward``), as GRAIL's ``published`` code, or by
    ``both``. ``answered``: there is a complete box, of text ``answer``. ``no_verdict``: it counts as incorrect."""
    if grader == "both":
        published = grade(samples, "published")[["right", "no_verdict"]]
        return grade(samples, "reward").join(published.add_suffix("_published"))
    answers = samples[["benchmark", "text", "gold"]]
    if grader == "published":
        command = [sys.executable, "-P", Path(__file__).with_name("published_worker.py")]
        lists = json.dumps(answers.to_numpy().tolist())
        done = subprocess.run(command, input=lists, stdout=subprocess.PIPE, text=True, check=True)
        verdicts = json.loads(done.stdout.splitlines()[-1])
    else:
        with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
            verdicts = [*executor.map(compute_score, *answers.to_numpy().T)]
    graded = pd.DataFrame(verdicts, index=samples.index)
    names = {"score": "right", "answer_found": "answered", "verify_failed": "no_verdict"}
    scores = samples[[*KEY, "tokens", "gold"]].join(
        graded[[*names]].astype(bool).rename(columns=names)
    )
    return scores.assign(truncated=samples["finish_reason"] == "length", answer=graded["pred"])


def by_problem(scores: pd.DataFrame) -> pd.DataFrame:
    """Returns the metrics of each problem's samples, by ``benchmark`` and ``index``: shares, but for ``tokens``, a
    mean."""
    metrics = {
        "acc": ("right", "mean"),
        "pass": ("right", "max"),
        "tokens": ("tokens", "mean"),
        "unanswered": ("unanswered", "mean"),
        "truncated": ("truncated", "mean"),
    }
    if "right_published" in scores:
        metrics["acc, published"] = ("right_published", "mean")
        metrics["pass, published"] = ("right_published", "max")
    problems = scores.assign(unanswered=~scores["answered"]).groupby(
        ["benchmark", "index"], sort=False
    )
    return problems.agg(**metrics).astype(float)


def figures(problems: pd.DataFrame, samples: int) -> dict[str, Any]:
    """Returns ``value``, ``low``, ``high`` of every metric and the share of resamples ``above_zero``: of ``benchmarks``,
    of their ``mean`` and their ``weighted_mean``. ``problems``: as of :func:`by_problem`, or a difference of two."""
    names = [re.sub("^(acc|pass)", rf"\1@{samples}", str(name)) for name in problems.columns]

    # The first row is of the problems themselves
    def of_means(means: np.ndarray) -> dict[str, Any]:
        low, high = np.quantile(means[1:], [0.025, 0.975], axis=0)
        # Differences of means are sums of fractions, so that equal runs may differ by rounding.
        rows = {
            "value": means[0],
            "low": low,
            "high": high,
            "above_zero": (means[1:] > 1e-9).mean(axis=0),
        }
        return pd.DataFrame(rows, index=names).T.to_dict()

    benchmarks = {}
    means = []
    for name, of_name in problems.groupby(level="benchmark", sort=False):
        key = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)
        count = len(of_name)
        random = np.random.default_rng([INTERVAL["seed"], key])
        counts = random.multinomial(count, np.full(count, 1 / count), size=INTERVAL["resamples"])
        # Counts (resamples, problems) times values (problems, metrics): the means of all resamples.
        means.append(np.vstack([of_name.mean(), counts @ of_name.to_numpy() / count]))
        benchmarks[name] = {"problems": count, **of_means(means[-1])}
    weighted = np.average(means, axis=0, weights=[row["problems"] for row in benchmarks.values()])
    return {
        "benchmarks": benchmarks,
        "mean": of_means(np.mean(means, axis=0)),
        "weighted_mean": of_means(weighted),
    }


def summarise(run: dict[str, Any], scores: pd.DataFrame) -> dict[str, Any]:
    """Returns the content of ``results.json``: ``run`` and the figures, shares from 0 to 1. ``tokens_of_answered``: as
    the published code, over responses with a box."""
    result = figures(by_problem(scores), run["sampling"]["samples"])
    for name, row in result["benchmarks"].items():
        of_name = scores[scores["benchmark"] == name]
        counts = of_name.filter(like="no_verdict").sum().items()
        row |= {column.replace("_published", ", published"): int(count) for column, count in counts}
        row["responses"] = len(of_name)
        row["tokens_of_answered"] = of_name[of_name["answered"]]["tokens"].mean()
    tokens, sizes = (
        pd.DataFrame(result["benchmarks"]).loc[["tokens_of_answered", "problems"]].to_numpy(float)
    )
    result["mean"]["tokens_of_answered"] = tokens.mean()
    result["weighted_mean"]["tokens_of_answered"] = np.average(tokens, weights=sizes)
    return {"run": run, "interval": INTERVAL, **result}


def compare(
    results: tuple[dict[str, Any], ...], scores: tuple[pd.DataFrame, ...]
) -> dict[str, Any]:
    """Returns the figures of the second of two runs minus those of the first, beside the results of both; ValueError
    names all differences of benchmarks, prompts, ground truths, grader and sampling but for its seed."""
    settings = []
    benchmarks = []
    for result, frame in zip(results, scores, strict=True):
        run = result["run"]
        # Two evaluations may differ in their seed.
        settings.append({**run["sampling"], "grader": run.get("grader"), "seed": None})
        benchmarks.append(
            {
                name: rows.to_dict("list")
                for name, rows in frame[[*KEY, "gold"]].groupby("benchmark")
            }
        )
    unequal = [f"{name} {a!r} and {b!r}" for name, a, b in _differing(*settings)]
    unequal += [f"prompts or ground truths of {name}" for name, _, _ in _differing(*benchmarks)]
    if unequal:
        remedy = "evaluate both with the same data, template and options, or --regrade one"
        raise ValueError(f"these evaluations cannot be compared: {'; '.join(unequal)}; {remedy}")
    difference = by_problem(scores[1]) - by_problem(scores[0])
    result = figures(difference, settings[0]["samples"])
    return {**result, "interval": INTERVAL, "first": results[0], "second": results[1]}


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the names under which two mappings have other values, with both."""
    pairs = [(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return [(name, a, b) for name, a, b in pairs if a != b]


def page(result: dict[str, Any]) -> str:
    """Returns a run's report as a Markdown page (docs/evaluation.md), or a comparison after the reports of both
    runs."""
    sign = "" if "run" in result else "+z"  # of the figures of a comparison
    digits_of_shares = 2 if sign else 1
    rows = []
    means = {
        "mean over benchmarks": result["mean"],
        "mean weighted by problems": result["weighted_mean"],
    }
    names = [name for name, row in result["mean"].items() if isinstance(row, dict)]
    for label, row in (result["benchmarks"] | means).items():
        rows.append([shown(label), row.get("problems", "")])
        for name in names:
            scale = 1 if name == "tokens" else 100
            digits = 0 if name == "tokens" else digits_of_shares
            value, low, high = (
                f"{scale * row[name][key]:{sign}.{digits}f}" for key in ("value", "low", "high")
            )
            # Of a difference also the share of resamples in which B is above A.
            share = f", {row[name]['above_zero']:.1%}" if sign else ""
            rows[-1].append(f"{value} [{low}, {high}]{share}")
    head = [
        "benchmark",
        "problems",
        *(name if name == "tokens" else f"{name}, %" for name in names),
    ]
    lines = "\n".join(table(head, rows, right=1))
    if sign:
        a = result["first"]
        b = result["second"]
        return f"{page(a)}\n{page(b)}\n# B (`{shown(b['folder'])}`) minus A (`{shown(a['folder'])}`)\n\n{lines}\n"
    settings = result["run"] | result["run"]["sampling"]
    settings["mean tokens of responses with a box"] = f"{result['mean']['tokens_of_answered']:.0f}"
    settings |= (
        pd.DataFrame(result["benchmarks"].values())
        .filter(like="no_verdict")
        .sum()
        .astype(int)
        .to_dict()
    )
    listed = [
        shown(f"{name} {value}") for name, value in settings.items() if not isinstance(value, dict)
    ]
    return f"# Evaluation of `{shown(settings['model'])}`\n\n{lines}\n\n{', '.join(listed)}.\n"


def shown(text: str) -> str:
    """Returns a text of a file in one line, with its invisible characters spelt out."""
    return visible(text, breaks=False)
