"""The result of :mod:`.localisation` as a page, tables and a figure."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study.localisation.measure import METRICS, SPLITS, Figure, Localisation

PAGE = "localisation.md"
_COLUMNS = (
    ("token_auroc", "tokens"),
    ("number_auroc", "number tokens"),
    ("result_auroc", "result tokens"),
    ("step_auroc_mean", "steps, mean"),
    ("step_auroc_max", "steps, max"),
)
_OTHERS = (
    ("precision_at_1", "precision at 1"),
    ("precision_at_5", "precision at 5"),
    ("step_first_mean", "wrong step first, mean"),
    ("step_first_max", "wrong step first, max"),
    ("step_rank_mean", "rank, mean"),
    ("step_rank_max", "rank, max"),
    ("weight_auroc", "AUROC of weights"),
    ("weight_lift", "weight lift"),
)
_PANELS = (
    ("token_auroc", "AUROC, tokens", 0.5),
    ("result_auroc", "AUROC, result tokens", 0.5),
    ("step_auroc_max", "AUROC, steps by highest token", 0.5),
)


def write_report(result: Localisation, folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write the page, the figures as CSV and JSON, those of each problem as CSV, and a plot as PNG and SVG.

    Args:
        result: the figures.
        folder: where to.
        about: what was measured: model, file, methods, versions; for the page and the JSON.

    Returns:
        The files; without the plot where matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_write_figures(result, folder / "localisation.csv"), _write_problems(result, folder / "problems.csv")]
    json_path = folder / "localisation.json"
    record = {
        "about": dict(about),
        "problems": result.problems,
        "mean_steps": result.steps,
        "mean_tokens": result.tokens,
        "wrong_step_last": result.last,
        "left_out": dict(result.left_out),
        "directions": dict(result.directions),
        "metrics": METRICS,
        "figures": [dict(zip(_HEAD, line, strict=True)) for line in _lines(result)],
    }
    json_path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    paths.append(json_path)
    plots = _plot(result, folder)
    page = folder / PAGE
    page.write_text(markdown(result, about, [path.name for path in plots if path.suffix == ".png"]), encoding="utf-8")
    return [page, *paths, *plots]


_HEAD = ("ranking", "split", "metric", "of", "value", "low", "high", "problems")


def _lines(result: Localisation) -> list[tuple[Any, ...]]:
    return [
        (*key, *(round(number, 5) for number in (figure.value, figure.low, figure.high)), figure.problems)
        for key, figure in result.figures.items()
    ]


def _write_figures(result: Localisation, path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([_HEAD, *_lines(result)])
    return path


def _write_problems(result: Localisation, path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("problem", "of", "wrong_step", "ranking", *METRICS))
        for problem, twin, last, ranking, figures in result.per_problem:
            numbers = ["" if figures[name] != figures[name] else f"{figures[name]:.4g}" for name in METRICS]
            writer.writerow((problem, "twin" if twin else "wrong", "last" if last else "not last", ranking, *numbers))
    return path


# ------------------------------------------------------------------------------------------------------------------- page


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
        *(f"- {title}: {METRICS[metric]}." for metric, title in (*_COLUMNS, *_OTHERS)),
        "",
    ]
    return "\n".join(lines)


def _table(result: Localisation, columns: Sequence[tuple[str, str]], split: str = "all") -> list[str]:
    rows = [["ranking by", *(title for _, title in columns)]]
    for ranking in result.rankings:
        rows.append([f"`{ranking}`" if ranking in result.directions else ranking])
        rows[-1] += [_formatted(result.get(ranking, metric, split)) for metric, _ in columns]
    return _markdown_table(rows)


def _twins(result: Localisation) -> list[str]:
    rows = [["ranking by"]]
    shown = (("token_auroc", "tokens"), ("result_auroc", "result tokens"), ("step_auroc_max", "steps, max"))
    for _, title in shown:
        rows[0] += [f"{title}: right solution", f"{title}: difference"]
    for ranking in result.rankings:
        rows.append([f"`{ranking}`" if ranking in result.directions else ranking])
        for metric, _ in shown:
            rows[-1].append(_formatted(result.get(ranking, metric, kind="twin")))
            rows[-1].append(_formatted(result.get(ranking, metric, kind="difference"), sign="+"))
    return _markdown_table(rows)


def _formatted(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    value, low, high = (round(number, 2) + 0.0 for number in (figure.value, figure.low, figure.high))  # no minus zero
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|",
        *(f"| {' | '.join(row)} |" for row in body),
    ]


# ------------------------------------------------------------------------------------------------------------------- plot


def _plot(result: Localisation, folder: Path) -> list[Path]:
    """Dots with their intervals, a panel a metric; nothing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return []
    names = list(result.rankings)
    canvas = Canvas(figsize=(11, 1.6 + 0.34 * len(names)), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(1, len(_PANELS), sharey=True)
    for axes, (metric, title, chance) in zip(panels, _PANELS, strict=True):
        axes.axvline(chance, color="0.6", linewidth=1)
        for kind, offset, style, label in (
            ("wrong", -0.13, {"color": "#0072B2", "marker": "o"}, "solution with the wrong step"),
            (
                "twin",
                0.17,
                {"color": "#D55E00", "marker": "o", "markerfacecolor": "white"},
                "the same step, still right",
            ),
        ):
            shown = [(place, result.get(name, metric, kind=kind)) for place, name in enumerate(names)]
            known = [(place, figure) for place, figure in shown if figure is not None]
            if not known:
                continue
            values = [figure.value for _, figure in known]
            errors = [
                [figure.value - figure.low for _, figure in known],
                [figure.high - figure.value for _, figure in known],
            ]
            places = [place + offset for place, _ in known]
            axes.errorbar(
                values, places, xerr=errors, linestyle="none", markersize=5, linewidth=1.2, label=label, **style
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    if any(kind == "twin" for *_, kind in result.figures):
        canvas.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
    paths = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = folder / f"localisation.{suffix}"
        canvas.savefig(path, dpi=150, metadata=metadata)
        paths.append(path)
    return paths
