"""Two runs side by side: differences with a paired bootstrap over problems.

Both runs are resampled with the same problems, so that a problem's difficulty drops out of the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipe.evaluate.bootstrap import (
    LEVEL,
    RESAMPLES,
    SEED,
    interval,
    over_benchmarks,
    resampled_means,
    share_above_zero,
)
from recipe.evaluate.report import MEAN_LABELS, describe_run, draw_points, metric_names
from recipe.evaluate.scores import METRICS, ProblemScores, metric_table, read_scores, scores_path

PUBLISHED_SOURCE = "GRAIL minus GRPO as published (arXiv 2606.04889), mean over five models and six benchmarks"
PUBLISHED_DIFFERENCES = {"acc": 0.0360, "pass": 0.0305}
"""The only published figures, as shares; nothing is known of single models or benchmarks."""
_PUBLISHED_SAMPLES = 3
# Everything but the seed, which changes the samples but not their distribution.
_SAME_SAMPLING = ("samples", "temperature", "top_p", "top_k", "max_tokens")
_SHOWN = ("acc", "pass", "tokens")


@dataclass(frozen=True)
class FinishedRun:
    """An output folder of a finished evaluation."""

    folder: Path
    report: Mapping[str, Any]
    scores: Mapping[str, list[ProblemScores]]

    @classmethod
    def load(cls, folder: Path) -> FinishedRun:
        """Read ``results.json`` and the scores that it sums up.

        Raises:
            ValueError: the evaluation is not finished, or a file is damaged.
        """
        path = folder / "results.json"
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"--compare {folder} has no results.json: no evaluation ended there; run it (again) with --output-dir {folder}"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}); run the evaluation again, it keeps its generations"
            ) from None
        scores = {}
        for name, figures in report["benchmarks"].items():
            scores[name] = read_scores(scores_path(folder, name))
            if len(scores[name]) != figures["problems"]:
                raise ValueError(
                    f"{scores_path(folder, name)} has {len(scores[name])} problems, {path} says {figures['problems']}; run "
                    "the evaluation again, it keeps its generations"
                )
        return cls(folder, report, scores)


def compare(first: FinishedRun, second: FinishedRun) -> dict[str, Any]:
    """Return the figures of both runs and ``second - first`` with intervals, for each benchmark and both means.

    Raises:
        ValueError: the runs' benchmarks, problems, gold answers, prompt template or sampling differ; the message names every
            difference.
    """
    _check_comparable(first, second)
    names = metric_names(first.report["run"]["sampling"]["samples"])
    values, resamples, sizes = {}, {}, {}
    result: dict[str, Any] = {
        "first": {"folder": str(first.folder), "run": first.report["run"]},
        "second": {"folder": str(second.folder), "run": second.report["run"]},
        "interval": {
            "level": LEVEL,
            "method": "paired percentile bootstrap over problems",
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "published": {"source": PUBLISHED_SOURCE, "samples": _PUBLISHED_SAMPLES, **PUBLISHED_DIFFERENCES},
        "benchmarks": {},
    }
    for name in first.scores:
        tables = np.stack([metric_table(run.scores[name]) for run in (first, second)])
        values[name] = tables.mean(axis=1)
        sizes[name] = tables.shape[1]
        resamples[name] = resampled_means(name, tables[1] - tables[0])
        result["benchmarks"][name] = {
            "problems": sizes[name],
            **_differences(names, values[name], resamples[name]),
        }
    for key, value, means in zip(
        MEAN_LABELS, over_benchmarks(values, sizes), over_benchmarks(resamples, sizes), strict=True
    ):
        result[key] = _differences(names, value, means)
    return result


def _check_comparable(first: FinishedRun, second: FinishedRun) -> None:
    differences = []
    sampling = [run.report["run"]["sampling"] for run in (first, second)]
    for option in _SAME_SAMPLING:
        if sampling[0][option] != sampling[1][option]:
            differences.append(f"{option} is {sampling[0][option]} and {sampling[1][option]}")
    templates = [run.report["run"].get("template") for run in (first, second)]
    for run, template in zip((first, second), templates, strict=True):
        if template is None:
            differences.append(
                f"{run.folder} has no record of its prompt template (run its evaluation again: it keeps its generations)"
            )
    if None not in templates:
        differences += [
            f"template.{key} is {templates[0].get(key)!r} and {templates[1].get(key)!r}"
            for key in {**templates[0], **templates[1]}
            if templates[0].get(key) != templates[1].get(key)
        ]
    reports = [run.report["benchmarks"] for run in (first, second)]
    if set(reports[0]) != set(reports[1]):
        differences.append(f"benchmarks are {', '.join(reports[0])} and {', '.join(reports[1])}")
    for name in reports[0]:
        for key, subject in (("problems_hash", "the problems"), ("gold_hash", "the gold answers")):
            if name in reports[1] and reports[0][name][key] != reports[1][name][key]:
                differences.append(f"{subject} of {name} differ")
    if differences:
        raise ValueError(
            f"--compare {first.folder} {second.folder}: these runs cannot be compared: {'; '.join(differences)}; evaluate "
            "both with the same data, chat template and options"
        )


def _differences(
    names: Mapping[str, str], values_2M: np.ndarray, differences_RM: np.ndarray
) -> dict[str, dict[str, float]]:
    low_M, high_M = interval(differences_RM)
    above_M = share_above_zero(differences_RM)
    return {
        names[metric]: {
            "first": float(values_2M[0, m]),
            "second": float(values_2M[1, m]),
            "value": float(values_2M[1, m] - values_2M[0, m]),
            "low": float(low_M[m]),
            "high": float(high_M[m]),
            "above_zero": float(above_M[m]),
        }
        for m, metric in enumerate(METRICS)
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The comparison as a Markdown page."""
    runs = [result[key]["run"] for key in ("first", "second")]
    samples = runs[0]["sampling"]["samples"]
    names = metric_names(samples)
    lines = ["# B compared with A", ""]
    for letter, key in (("A", "first"), ("B", "second")):
        lines.append(f"- {letter}: `{result[key]['run']['model']}` (`{result[key]['folder']}`)")
    rows = [*result["benchmarks"].items(), *((label, result[key]) for key, label in MEAN_LABELS.items())]
    for metric in _SHOWN:
        scale, digits, unit = (1, 0, "") if metric == "tokens" else (100, 1, ", %")
        change = "B - A" if metric == "tokens" else "B - A, points"
        lines += [
            "",
            f"| {'mean tokens' if metric == 'tokens' else names[metric]} | problems | A{unit} | B{unit} | {change} | above 0 |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for name, figures in rows:
            figure = figures[names[metric]]
            first, second = (f"{scale * figure[key]:.{digits}f}" for key in ("first", "second"))
            value, low, high = (_signed(scale * figure[key], digits + (unit != "")) for key in ("value", "low", "high"))
            cells = [name, str(figures.get("problems", "")), first, second, f"{value} [{low}, {high}]"]
            lines.append(f"| {' | '.join(cells)} | {figure['above_zero']:.1%} |")
        if metric in PUBLISHED_DIFFERENCES and samples == _PUBLISHED_SAMPLES:
            published = _signed(100 * PUBLISHED_DIFFERENCES[metric], 2)
            lines.append(f"| *published, GRAIL - GRPO* |  |  |  | *{published}* |  |")
    lines.append("")
    if samples == _PUBLISHED_SAMPLES:
        lines.append(f"- *published*: {PUBLISHED_SOURCE}; single models and benchmarks are not known.")
    described = [describe_run(run) for run in runs]
    if described[0] == described[1]:
        lines.append(f"- {described[0]}")
    else:
        lines += [f"- {letter}: {sentence}" for letter, sentence in zip("AB", described, strict=True)]
    lines.append(
        f"- In brackets: {result['interval']['level']:.0%} intervals, {result['interval']['method']}, "
        f"{result['interval']['resamples']} resamples; above 0: the share of them in which B is above A."
    )
    return "\n".join(lines) + "\n"


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.replace("-", "+") if float(text) == 0 else text


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Differences of the accuracies with their intervals, a row a benchmark, and the published ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [result[key]["run"] for key in ("first", "second")]
    samples = runs[0]["sampling"]["samples"]
    rows = [*result["benchmarks"].items(), *((label, result[key]) for key, label in MEAN_LABELS.items())]
    heights = np.arange(len(rows))[::-1]
    figure, panels = pyplot.subplots(
        1, 2, figsize=(10, 1.8 + 0.45 * len(rows)), dpi=120, sharey=True, sharex=True, layout="constrained"
    )
    for axes, metric, color in zip(panels, ("acc", "pass"), ("#0b6e4f", "#c8553d"), strict=True):
        name = metric_names(samples)[metric]
        draw_points(axes, heights, [row[name] for _, row in rows], name, color, "o", 100)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axhline(1.5, color="#9aa5b1", linewidth=0.8)
        if samples == _PUBLISHED_SAMPLES:
            # A mean over benchmarks, so it belongs to that row alone: the last but one.
            value = 100 * PUBLISHED_DIFFERENCES[metric]
            axes.plot([value], [0.8], "D", color="black", markerfacecolor="none", label="published, GRAIL - GRPO")
        axes.set(xlabel=f"{name}, B - A, points")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    panels[0].set_yticks(heights, [f"{name} ({row['problems']})" if "problems" in row else name for name, row in rows])
    figure.suptitle(
        f"A: {Path(result['first']['folder']).name}   B: {Path(result['second']['folder']).name}   (95 % intervals)",
        fontsize=11,
    )
    figure.savefig(path)
    pyplot.close(figure)
