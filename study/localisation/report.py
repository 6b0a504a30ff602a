"""The result of :mod:`.localisation` as a page, tables and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pandas as pd

from recipe.marked_text import table
from study.localisation.measure import METRICS, SPLITS, Figure, Localisation
from study.tables import pyplot

PAGE = "localisation.md"
_COLUMNS = {
    "token_auroc": "tokens",
    "number_auroc": "number tokens",
    "result_auroc": "result tokens",
    "step_auroc_mean": "steps, mean",
    "step_auroc_max": "steps, max",
}
_OTHERS = {
    "precision_at_1": "precision at 1",
    "precision_at_5": "precision at 5",
    "step_first_mean": "wrong step first, mean",
    "step_first_max": "wrong step first, max",
    "step_rank_mean": "rank, mean",
    "step_rank_max": "rank, max",
    "weight_auroc": "AUROC of weights",
    "weight_lift": "weight lift",
}
_TWINS = {"token_auroc": "tokens", "result_auroc": "result tokens", "step_auroc_max": "steps, max"}
_PANELS = {"token_auroc": "tokens", "result_auroc": "result tokens", "step_auroc_max": "steps by highest token"}
_HEAD = ("ranking", "split", "metric", "of", "value", "low", "high", "problems")


def write_report(result: Localisation, folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write the page, the figures as CSV and JSON, those of each problem as CSV, and a plot as PNG and SVG; their paths.

    Args:
        result: the figures.
        folder: where to.
        about: model, file, methods and versions, for the page and the JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = (PAGE, "localisation.csv", "problems.csv", "localisation.json", "localisation.png", "localisation.svg")
    paths = [folder / name for name in names]
    lines = [(*key, *astuple(figure)) for key, figure in result.figures.items()]
    figures = pd.DataFrame(lines, columns=_HEAD).round({"value": 5, "low": 5, "high": 5})
    figures.to_csv(paths[1], index=False)
    problems = [
        (problem, "twin" if twin else "wrong", "last" if last else "not last", ranking, *values.values())
        for problem, twin, last, ranking, values in result.per_problem
    ]
    head = ["problem", "of", "wrong_step", "ranking", *METRICS]
    pd.DataFrame(problems, columns=head).to_csv(paths[2], index=False, float_format="%.4g")
    record = {
        "about": dict(about),
        "problems": result.problems,
        "mean_steps": result.steps,
        "mean_tokens": result.tokens,
        "wrong_step_last": result.last,
        "left_out": dict(result.left_out),
        "directions": dict(result.directions),
        "metrics": METRICS,
        "figures": figures.to_dict("records"),
    }
    paths[3].write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _plot(result, paths[4:])
    paths[0].write_text(markdown(result, about, [paths[4].name]), encoding="utf-8")
    return paths


def markdown(result: Localisation, about: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The page."""
    has_twins = any(kind == "twin" for *_, kind in result.figures)
    lines = [
        "# Does the weight find the wrong step?",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"- {result.problems} solutions with one labelled wrong step, in {result.last} of them the last one; on average "
        f"{result.steps:.1f} steps and {result.tokens:.0f} tokens in them.",
        *(f"- left out: {count} {reason}" for reason, count in result.left_out.items()),
        "",
        "AUROC inside each solution, mean over solutions with its 95 % bootstrap interval over problems; 0.5 is chance. Each "
        "method ranks tokens by its score, read in the direction in which its weight grows.",
        "",
        *_table(result, _COLUMNS),
        "",
    ]
    for picture in pictures:
        lines += [f"![Figures of the table with their intervals]({picture})", ""]
    if has_twins:
        lines += [
            "## What is due to the error",
            "",
            "The same figures for the right solutions that the wrong ones were made of (the step that is going to be changed "
            "against the others), and the difference, problem by problem. What a method finds there already is the place and "
            "the kind of the step, not the error.",
            "",
            *_twins(result),
            "",
        ]
    for split in SPLITS[1:]:
        problems = result.last if split == "wrong step last" else result.problems - result.last
        if problems:
            lines += [
                f"## {split[0].upper() + split[1:]}: {problems} problems",
                "",
                *_table(result, _COLUMNS, split),
                "",
            ]
    lines += [
        "## Other figures",
        "",
        *_table(result, _OTHERS),
        "",
        *(f"- {title}: {METRICS[metric]}." for metric, title in (_COLUMNS | _OTHERS).items()),
        "",
    ]
    return "\n".join(lines)


def _table(result: Localisation, columns: Mapping[str, str], split: str = "all") -> list[str]:
    rows = [
        [_name(result, ranking), *(_formatted(result.get(ranking, metric, split)) for metric in columns)]
        for ranking in result.rankings
    ]
    return table(["ranking by", *columns.values()], rows, right=1)


def _twins(result: Localisation) -> list[str]:
    rows = [
        [
            _name(result, ranking),
            *(
                _formatted(result.get(ranking, metric, kind=kind), "+" if kind == "difference" else "")
                for metric in _TWINS
                for kind in ("twin", "difference")
            ),
        ]
        for ranking in result.rankings
    ]
    head = [f"{title}: {of}" for title in _TWINS.values() for of in ("right solution", "difference")]
    return table(["ranking by", *head], rows, right=1)


def _name(result: Localisation, ranking: str) -> str:
    return f"`{ranking}`" if ranking in result.directions else ranking


def _formatted(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    value, low, high = (round(number, 2) + 0.0 for number in (figure.value, figure.low, figure.high))  # no minus zero
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def _plot(result: Localisation, paths: Sequence[Path]) -> None:
    """Dots with their intervals, a panel a metric."""
    plots, names = pyplot(), list(result.rankings)
    canvas, panels = plots.subplots(
        1, len(_PANELS), figsize=(11, 1.6 + 0.34 * len(names)), sharey=True, layout="constrained"
    )
    styles = {
        "wrong": (-0.13, "solution with the wrong step", {"color": "#0072B2"}),
        "twin": (0.17, "the same step, still right", {"color": "#D55E00", "markerfacecolor": "white"}),
    }
    for axes, (metric, title) in zip(panels, _PANELS.items(), strict=True):
        axes.axvline(0.5, color="0.6", linewidth=1)
        for kind, (offset, label, style) in styles.items():
            shown = [(place, result.get(name, metric, kind=kind)) for place, name in enumerate(names)]
            known = [
                (place + offset, f.value, f.value - f.low, f.high - f.value) for place, f in shown if f is not None
            ]
            if known:
                places, values, *errors = zip(*known, strict=True)
                shape = {"linestyle": "none", "marker": "o", "markersize": 5, "linewidth": 1.2}
                axes.errorbar(values, places, xerr=errors, label=label, **shape, **style)
        axes.set_title(f"AUROC, {title}", fontsize=10)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    labels = panels[0].get_legend_handles_labels()
    if len(labels[0]) > 1:
        canvas.legend(*labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
        canvas.savefig(path, dpi=150, metadata=metadata)
    plots.close(canvas)
