"""The figures of a run for papers: each as PNG, SVG and CSV.

    python -m grail_advantage.report RUN --figures FOLDER

- ``curves``: what the run logged, step by step;
- ``profile``: the mean weight of the reasoning by its normalised position, correct against incorrect responses, over parts of
  the training, with 95 % intervals over prompts. GRAIL's paper (arXiv 2606.04889) has a U there;
- ``heat_map``: the same by step and position.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grail_advantage.view.page import by_position, colours, data
from grail_advantage.view.page.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = list[list[object]]
"""A CSV's, the names of its columns first."""
OUTCOME_COLOURS = {"right": "#1f6fb5", "wrong": "#c0561a", "": "#555555"}
"""Blue and orange, as dark on white as text must be."""
_STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    # Text stays text in an SVG, and equal figures make equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "grail_advantage",
    # Names are not formulas.
    "text.parse_math": False,
}


def write_figures(run: data.Run, folder: Path, table: by_position.RowTable | None = None) -> list[Path]:
    """Draw what a run has data for.

    Args:
        run: from :func:`grail_advantage.view.page.data.open_run`.
        folder: is made where it is missing.
        table: the dump's rows where somebody has read them already.

    Returns:
        The files.

    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    curves = data.curves(run.metrics)
    if table is None and run.dump is not None:
        table = by_position.row_table(run.dump)
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        if curves:
            size = 3.2 * min(3, len(curves)), 2.5 * math.ceil(len(curves) / 3)
            written += _write(folder, "curves", size, lambda figure: draw_curves(figure, curves))
        if table is not None and table.scored.any():
            profiles, heat = by_position.profiles(table), by_position.heat_map(table)
            size = 2.4 * len({profile.first_step for profile in profiles}) + 0.8, 2.7
            written += _write(folder, "profile", size, lambda figure: draw_profiles(figure, profiles))
            written += _write(folder, "heat_map", (5, 3.2), lambda figure: draw_heat_map(figure, heat))
    if not written:
        raise ValueError(
            f"{run.folder} has nothing to draw: no metric that is known here, and no response with scores in its token dump"
        )
    return written


def _write(folder: Path, name: str, size: tuple[float, float], draw: Callable[[Figure], Rows]) -> list[Path]:
    """A figure's files; ``draw`` draws it and returns its numbers."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("csv", "png", "svg")]
    figure = Figure(figsize=size, layout="constrained")
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(draw(figure))
    figure.savefig(paths[1], metadata={"Software": None})
    figure.savefig(paths[2], metadata={"Date": None, "Creator": None})
    return paths


def _number(value: float) -> str:
    """For a CSV: empty where there is none; as short as a float64 allows."""
    return repr(float(value)) if math.isfinite(value) else ""


def draw_curves(figure: Figure, curves: Sequence[data.Curve]) -> Rows:
    """One plot a curve, three in a row."""
    rows: Rows = [["figure", "line", "step", "value"]]
    columns = min(3, len(curves))
    grid = figure.subplots(math.ceil(len(curves) / columns), columns, squeeze=False).ravel()
    for plot, curve in zip(grid, curves, strict=False):
        for line in curve.lines:
            label = visible(line.label, breaks=False)
            marker = "o" if len(line.steps) <= 30 else None
            plot.plot(line.steps, line.values, marker=marker, markersize=3, linewidth=1.2, label=label)
            points = zip(line.steps, line.values, strict=True)
            rows += [[curve.name, label, step, _number(value)] for step, value in points]
        plot.set(title=curve.title, xlabel="step", ylabel=curve.unit)
        if len(curve.lines) > 1:
            plot.legend(fontsize=7)
    for plot in grid[len(curves) :]:
        plot.remove()
    return rows


def _positions(bins: int) -> np.ndarray:
    """Middles of the bins."""
    return (np.arange(bins) + 0.5) / bins


def draw_profiles(figure: Figure, profiles: Sequence[by_position.Profile]) -> Rows:
    """One plot a part of the training, on one scale."""
    rows: Rows = [["first_step", "last_step", "outcome", "position", "mean", "low", "high", "rows", "prompts"]]
    parts = sorted({(profile.first_step, profile.last_step) for profile in profiles})
    plots = dict(zip(parts, figure.subplots(1, len(parts), sharey=True, squeeze=False)[0], strict=True))
    for (first, last), plot in plots.items():
        plot.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        plot.set(title=steps, xlabel="position in the reasoning", xlim=(0, 1))
    for profile in profiles:
        part, means, colour = (profile.first_step, profile.last_step), profile.means, OUTCOME_COLOURS[profile.outcome]
        positions = _positions(len(means.mean))
        label = f"{data.OUTCOME_WORDS[profile.outcome]} ({means.rows} responses)"
        style = "--" if profile.outcome == "wrong" else "-"
        plots[part].plot(positions, means.mean, style, color=colour, linewidth=1.3, label=label)
        plots[part].fill_between(positions, means.low, means.high, color=colour, alpha=0.2, linewidth=0)
        for values in zip(positions, means.mean, means.low, means.high, strict=True):
            rows.append([*part, profile.outcome or "unknown", *map(_number, values), means.rows, means.groups])
    for plot in plots.values():
        plot.legend(fontsize=7)
    plots[parts[0]].set_ylabel("mean weight")
    return rows


def draw_heat_map(figure: Figure, heat: by_position.HeatMap) -> Rows:
    """Steps from left to right, positions upwards, colours by the weight's ratio to 1 as in the other views."""
    from matplotlib.colors import ListedColormap

    plot = figure.subplots()
    places = colours.weight_place(heat.weights)
    known = np.abs(places[np.isfinite(places)])
    # Means lie near 1: the scale ends at the farthest of them.
    limit = float(known.max()) if known.size and known.max() > 0 else 1.0
    scale = ListedColormap(colours.diverging(257))
    scale.set_bad("#d9d9d9")
    count, bins = heat.weights.shape
    edges = np.arange(count + 1), np.linspace(0, 1, bins + 1)
    shown = plot.pcolormesh(*edges, np.ma.masked_invalid(places).T, cmap=scale, vmin=-limit, vmax=limit)
    every = max(1, math.ceil(count / 8))
    plot.set_xticks(np.arange(0, count, every) + 0.5, [str(step) for step in heat.steps[::every]])
    plot.set(xlabel="step", ylabel="position in the reasoning", title="Mean weight of the responses with scores")
    plot.grid(False)
    ticks = np.linspace(-limit, limit, 5)
    bar = figure.colorbar(shown, ax=plot, ticks=ticks)
    bar.ax.set_yticklabels([f"{colours.WEIGHT_LIMIT**tick:.2f}" for tick in ticks])
    bar.set_label("weight (grey: no response)")
    rows: Rows = [["step", "position", "weight", "rows"]]
    for step, weights, of_step in zip(heat.steps, heat.weights, heat.rows, strict=True):
        cells = zip(_positions(bins), weights, strict=True)
        rows += [[step, _number(position), _number(weight), of_step] for position, weight in cells]
    return rows
