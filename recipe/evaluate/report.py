"""Figures of one run: ``results.json``, ``results.md`` and ``results.png``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe.evaluate.bootstrap import LEVEL, RESAMPLES, SEED, interval, over_benchmarks, resampled_means
from recipe.evaluate.files import write_text
from recipe.evaluate.problems import Benchmark
from recipe.evaluate.scores import METRICS, ProblemScores, metric_table

MEAN_LABELS = {"mean": "mean over benchmarks", "weighted_mean": "mean weighted by problems"}


def metric_names(samples: int) -> dict[str, str]:
    """Names that figures are reported under, by metric."""
    return {metric: f"{metric}@{samples}" if metric in ("acc", "pass") else metric for metric in METRICS}


def summarise(
    run: Mapping[str, Any], benchmarks: Sequence[Benchmark], scores: Mapping[str, list[ProblemScores]]
) -> dict:
    """The content of ``results.json``.

    Args:
        run: model, template, sampling and engine of the run.
        benchmarks: in the order of the report.
        scores: of every problem, by benchmark.

    Returns:
        ``run``, ``interval``, ``benchmarks`` (by name), ``mean`` and ``weighted_mean``. A figure has ``value``, ``low``
        and ``high``; accuracies and rates are shares from 0 to 1. ``unanswered`` and ``truncated`` also have ``count``.
    """
    names = metric_names(run["sampling"]["samples"])
    values, resamples, sizes = {}, {}, {}
    report: dict[str, Any] = {
        "run": dict(run),
        "interval": {
            "level": LEVEL,
            "method": "percentile bootstrap over problems",
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "benchmarks": {},
    }
    for benchmark in benchmarks:
        name, judged = benchmark.name, scores[benchmark.name]
        table = metric_table(judged)
        values[name], resamples[name], sizes[name] = table.mean(axis=0), resampled_means(name, table), len(judged)
        figures = _figures(names, values[name], resamples[name])
        figures["unanswered"]["count"] = sum(not answered for problem in judged for answered in problem.answered)
        figures["truncated"]["count"] = sum(truncated for problem in judged for truncated in problem.truncated)
        report["benchmarks"][name] = {
            "problems": len(judged),
            "responses": sum(len(problem.tokens) for problem in judged),
            "problems_hash": benchmark.digest,
            "gold_hash": benchmark.gold_digest,
            **figures,
            "no_verdict": sum(failed for problem in judged for failed in problem.no_verdict),
        }
    for key, value, means in zip(
        MEAN_LABELS, over_benchmarks(values, sizes), over_benchmarks(resamples, sizes), strict=True
    ):
        report[key] = _figures(names, value, means)
    return report


def _figures(names: Mapping[str, str], values_M: np.ndarray, means_RM: np.ndarray) -> dict[str, dict[str, Any]]:
    low_M, high_M = interval(means_RM)
    return {
        names[metric]: {"value": float(values_M[m]), "low": float(low_M[m]), "high": float(high_M[m])}
        for m, metric in enumerate(METRICS)
    }


def describe_run(run: Mapping[str, Any]) -> str:
    """One sentence on how the responses were drawn."""
    sampling = run["sampling"]
    return (
        f"{sampling['samples']} samples a problem, temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}, "
        f"top_k {sampling['top_k']}, at most {sampling['max_tokens']} tokens, seed {sampling['seed']}; chat template "
        f"{run['template']['chat_template']}, enable_thinking={run['template']['enable_thinking']}; {run['engine']}."
    )


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    samples = report["run"]["sampling"]["samples"]
    acc, passed = f"acc@{samples}", f"pass@{samples}"
    lines = [
        f"# Evaluation of `{report['run']['model']}`",
        "",
        f"| benchmark | problems | {acc}, % | {passed}, % | mean tokens | unanswered | truncated |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [(name, figures) for name, figures in report["benchmarks"].items()]
    rows += [(label, report[key]) for key, label in MEAN_LABELS.items()]
    for name, figures in rows:
        cells = [
            name,
            str(figures.get("problems", "")),
            _percent(figures[acc]),
            _percent(figures[passed]),
            _bracketed(figures["tokens"], 1, 0),
            _rate(figures["unanswered"]),
            _rate(figures["truncated"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"- {describe_run(report['run'])}",
        f"- {acc}: mean over samples; {passed}: any sample right; tokens with the end token; unanswered: no complete "
        "`\\boxed{}`; truncated: stopped by the limit on tokens.",
        f"- In brackets: {report['interval']['level']:.0%} intervals, {report['interval']['method']}, "
        f"{report['interval']['resamples']} resamples. Problems that all fare alike give an interval without width; "
        "that is no certainty.",
    ]
    failed = sum(figures["no_verdict"] for figures in report["benchmarks"].values())
    if failed:
        lines.append(f"- {failed} answers could not be judged within the limits and count as wrong.")
    return "\n".join(lines) + "\n"


def _bracketed(figure: Mapping[str, float], scale: float, digits: int) -> str:
    value, low, high = (f"{scale * figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _percent(figure: Mapping[str, float]) -> str:
    return _bracketed(figure, 100, 1)


def _rate(figure: Mapping[str, float]) -> str:
    text = f"{100 * figure['value']:.1f} % [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]"
    return f"{figure['count']}: {text}" if "count" in figure else text


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Accuracies and mean tokens with their intervals, a row a benchmark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = report["run"]["sampling"]["samples"]
    rows = [(name, figures) for name, figures in report["benchmarks"].items()]
    rows += [(label, report[key]) for key, label in MEAN_LABELS.items()]
    heights = np.arange(len(rows))[::-1]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 1.8 + 0.45 * len(rows)), dpi=120, sharey=True, width_ratios=[3, 2], layout="constrained"
    )
    draw_points(left, heights + 0.12, [row[f"acc@{samples}"] for _, row in rows], f"acc@{samples}", "#0b6e4f", "o", 100)
    draw_points(
        left, heights - 0.12, [row[f"pass@{samples}"] for _, row in rows], f"pass@{samples}", "#c8553d", "s", 100
    )
    left.set(xlabel="% of responses, of problems", xlim=(-2, 102))
    left.set_yticks(heights, [f"{name} ({row['problems']})" if "problems" in row else name for name, row in rows])
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    draw_points(right, heights, [row["tokens"] for _, row in rows], "tokens", "#3d5a80", "D", 1)
    right.set(xlabel="mean tokens a response", xlim=(0, 1.05 * max(row["tokens"]["high"] for _, row in rows)))
    for axes in (left, right):
        axes.axhline(1.5, color="#9aa5b1", linewidth=0.8)  # between benchmarks and means
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"{Path(report['run']['model']).name}: 95 % intervals over problems", fontsize=11)
    figure.savefig(path)
    pyplot.close(figure)


def draw_points(
    axes: Any,
    heights: np.ndarray,
    figures: Sequence[Mapping[str, float]],
    label: str,
    color: str,
    marker: str,
    scale: float,
) -> None:
    """Values as points with their intervals as horizontal bars."""
    values, low, high = (scale * np.array([figure[key] for figure in figures]) for key in ("value", "low", "high"))
    # A value may lie outside its interval by rounding.
    errors = np.maximum([values - low, high - values], 0)
    axes.errorbar(values, heights, xerr=errors, fmt=marker, color=color, label=label, capsize=3, markersize=5)


def write_report(report: Mapping[str, Any], output_dir: Path, name: str, text: str, draw: Any) -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png``; ``draw(report, path)`` makes the plot."""
    paths = [output_dir / f"{name}.{ending}" for ending in ("md", "png", "json")]
    write_text(paths[0], text)
    draw(report, paths[1])
    write_text(paths[2], json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return paths
