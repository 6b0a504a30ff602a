"""Samples graded, figures over problems with their 95 % intervals, and the comparison of two runs.

Intervals are a percentile bootstrap over problems, whose samples stay together. Each benchmark has its own generator,
whichever others are evaluated. Two runs have the same resamples: a problem's difficulty drops out of their difference.
"""

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
from recipe.evaluate.sampling import KEY, Count, Key, Record, check, differing, records

INTERVAL = {
    "level": 0.95,
    "method": "percentile bootstrap over problems",
    "resamples": 10_000,
    "seed": 0,
}


class Drawing(Record):
    """The parameters with which samples were drawn."""

    samples: Annotated[int, Field(ge=1, le=10**6)]


class Run(Record):
    """What an evaluation ran."""

    model: str
    sampling: Drawing
    grader: str | None = None


class Results(Record):
    """``results.json``, but for the figures, which follow from the scores."""

    run: Run


class Score(Key):
    """A line of ``scores.jsonl``."""

    gold: Any
    tokens: Count
    right: bool
    answered: bool
    no_verdict: bool
    truncated: bool
    right_published: bool | None = None
    no_verdict_published: bool | None = None


def read_scores(path: Path) -> pd.DataFrame:
    """Returns the scores in a file's lines; ValueError: a line has none, or there is no line."""
    scores = []
    for number, record in enumerate(records(path), start=1):
        try:
            check(Score, record)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        # Whatever else somebody may have written stays behind.
        scores.append(
            {name: record[name] for name in Score.model_fields if record.get(name) is not None}
        )
    if not scores:
        raise ValueError("has no scores")
    return pd.DataFrame(scores).drop_duplicates(KEY, ignore_index=True)


def grade(samples: pd.DataFrame, grader: str) -> pd.DataFrame:
    """Grade samples (with ``gold``, the ground truth) as in training (``reward``), as GRAIL's ``published`` code, or by
    ``both``. ``answered``: there is a complete box, of text ``answer``. ``no_verdict``: it counts as incorrect."""
    if grader == "both":
        published = grade(samples, "published")[["right", "no_verdict"]]
        return grade(samples, "reward").join(published.add_suffix("_published"))
    answers = samples[["benchmark", "text", "gold"]].to_numpy()
    if grader == "published":
        command = [sys.executable, "-P", Path(__file__).with_name("published_worker.py")]
        lists = json.dumps(answers.tolist())
        done = subprocess.run(command, input=lists, stdout=subprocess.PIPE, text=True, check=True)
        verdicts = json.loads(done.stdout.splitlines()[-1])
    else:
        # The verifier's own processes do the work.
        with ThreadPoolExecutor(8) as executor:
            verdicts = [*executor.map(compute_score, *answers.T)]
    graded = pd.DataFrame(verdicts, index=samples.index)
    return samples[[*KEY, "tokens", "gold"]].assign(
        right=graded["score"].astype(bool),
        answered=graded["answer_found"].astype(bool),
        no_verdict=graded["verify_failed"].astype(bool),
        truncated=samples["finish_reason"] == "length",
        answer=graded["pred"],
    )


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
    samples = scores.assign(unanswered=~scores["answered"])
    return samples.groupby(["benchmark", "index"], sort=False).agg(**metrics).astype(float)


def figures(problems: pd.DataFrame, samples: int) -> dict:
    """Returns ``value``, ``low``, ``high`` of every metric and the share of resamples ``above_zero``: of ``benchmarks``,
    of their ``mean`` and their ``weighted_mean``. ``problems``: as of :func:`by_problem`, or a difference of two."""
    names = [re.sub("^(acc|pass)", rf"\1@{samples}", name) for name in problems.columns]

    # The first row is of the problems themselves.
    def figures_of(means: np.ndarray) -> dict:
        low, high = np.quantile(means[1:], [0.025, 0.975], axis=0)
        # Differences of means are sums of fractions, so that equal runs may differ by rounding.
        above_zero = (means[1:] > 1e-9).mean(axis=0)
        rows = {"value": means[0], "low": low, "high": high, "above_zero": above_zero}
        return pd.DataFrame(rows, index=names).T.to_dict()

    benchmarks = {}
    means = []
    sizes = []
    for name, metrics in problems.groupby(level="benchmark", sort=False):
        key = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)
        count = len(metrics)
        random = np.random.default_rng([INTERVAL["seed"], key])
        counts = random.multinomial(count, np.full(count, 1 / count), size=INTERVAL["resamples"])
        # Counts (resamples, problems) times values (problems, metrics): the means of all resamples.
        means.append(np.vstack([metrics.mean(), counts @ metrics.to_numpy() / count]))
        sizes.append(count)
        benchmarks[name] = {"problems": count, **figures_of(means[-1])}
    return {
        "benchmarks": benchmarks,
        "mean": figures_of(np.mean(means, axis=0)),
        "weighted_mean": figures_of(np.average(means, axis=0, weights=sizes)),
    }


def summarise(run: dict, scores: pd.DataFrame) -> dict:
    """Returns the content of ``results.json``: ``run`` and the figures, shares from 0 to 1. ``tokens_of_answered``: as
    the published code, over responses with a box."""
    result = figures(by_problem(scores), run["sampling"]["samples"])
    tokens = []
    sizes = []
    for name, row in result["benchmarks"].items():
        responses = scores[scores["benchmark"] == name]
        for column, count in responses.filter(like="no_verdict").sum().items():
            row[column.replace("_published", ", published")] = int(count)
        row["responses"] = len(responses)
        row["tokens_of_answered"] = responses[responses["answered"]]["tokens"].mean()
        tokens.append(row["tokens_of_answered"])
        sizes.append(row["problems"])
    result["mean"]["tokens_of_answered"] = np.mean(tokens)
    result["weighted_mean"]["tokens_of_answered"] = np.average(tokens, weights=sizes)
    return {"run": run, "interval": INTERVAL, **result}


def compare(results: tuple[dict, ...], scores: tuple[pd.DataFrame, ...]) -> dict:
    """Returns the figures of the second of two runs minus those of the first, beside the results of both; ValueError
    names all differences of benchmarks, prompts, ground truths, grader and sampling but for its seed."""
    settings = []
    benchmarks = []
    for result, frame in zip(results, scores, strict=True):
        run = result["run"]
        # Two evaluations may differ in their seed.
        settings.append({**run["sampling"], "grader": run.get("grader"), "seed": None})
        groups = frame[[*KEY, "gold"]].groupby("benchmark")
        benchmarks.append({name: rows.to_dict("list") for name, rows in groups})
    unequal = [f"{name} {a!r} and {b!r}" for name, a, b in differing(*settings)]
    unequal += [f"prompts or ground truths of {name}" for name, _, _ in differing(*benchmarks)]
    if unequal:
        remedy = "evaluate both with the same data, template and options, or --regrade one"
        raise ValueError(f"these evaluations cannot be compared: {'; '.join(unequal)}; {remedy}")
    difference = by_problem(scores[1]) - by_problem(scores[0])
    result = figures(difference, settings[0]["samples"])
    return {**result, "interval": INTERVAL, "first": results[0], "second": results[1]}


def page(result: dict) -> str:
    """Returns a run's report as a Markdown page (docs/evaluation.md), or a comparison after the reports of both
    runs."""
    # Of the figures of a comparison.
    sign = "" if "run" in result else "+z"
    names = [name for name, row in result["mean"].items() if isinstance(row, dict)]
    labels = {
        **result["benchmarks"],
        "mean over benchmarks": result["mean"],
        "mean weighted by problems": result["weighted_mean"],
    }
    rows = []
    for label, row in labels.items():
        cells = [visible(label), row.get("problems", "")]
        for name in names:
            scale = 100
            digits = 2 if sign else 1
            if name == "tokens":
                scale = 1
                digits = 0
            figure = row[name]
            value, low, high = (
                f"{scale * figure[key]:{sign}.{digits}f}" for key in ("value", "low", "high")
            )
            # Of a difference also the share of resamples in which B is above A.
            share = f", {figure['above_zero']:.1%}" if sign else ""
            cells.append(f"{value} [{low}, {high}]{share}")
        rows.append(cells)
    units = [name if name == "tokens" else f"{name}, %" for name in names]
    lines = "\n".join(table(["benchmark", "problems", *units], rows, right=1))
    if sign:
        a = result["first"]
        b = result["second"]
        return f"{page(a)}\n{page(b)}\n# B (`{visible(b['folder'])}`) minus A (`{visible(a['folder'])}`)\n\n{lines}\n"
    settings = {**result["run"], **result["run"]["sampling"]}
    settings["mean tokens of responses with a box"] = f"{result['mean']['tokens_of_answered']:.0f}"
    counts = pd.DataFrame(result["benchmarks"].values()).filter(like="no_verdict").sum()
    settings.update(counts.astype(int))
    listed = [
        visible(f"{name} {value}")
        for name, value in settings.items()
        if not isinstance(value, dict)
    ]
    return f"# Evaluation of `{visible(settings['model'])}`\n\n{lines}\n\n{', '.join(listed)}.\n"
