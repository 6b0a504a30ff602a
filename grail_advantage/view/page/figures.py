"""The figures of a run for papers: each as PNG, SVG and CSV.

    python -m grail_advantage.report RUN --figures FOLDER

- ``profile``: the mean weight of the reasoning by its normalised position, correct against incorrect responses, with 95 %
  intervals over prompts. GRAIL's paper (arXiv 2606.04889) has a U there;
- ``heat_map``: the same by step and position.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grail_advantage.view.page import by_position, colours, data

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


def write_figures(run: data.Run, folder: Path, bins: int = by_position.BINS) -> list[Path]:
    """Draw what a run has data for.

    Args:
        run: from :func:`grail_advantage.view.page.data.open_run`.
        folder: is made where it is missing.
        bins: of the positions.

    Returns:
        The files.

    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    table = by_position.row_tables(run.dump or [], bins)[""]
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        if table.scored.any():
            written += _write(folder, "profile", (3.4, 2.7), lambda figure: draw_profiles(figure, table))
            written += _write(folder, "heat_map", (5, 3.2), lambda figure: draw_heat_map(figure, table))
    if not written:
        raise ValueError(f"{run.folder} has nothing to draw: no response with scores in a token dump")
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


def _positions(bins: int) -> np.ndarray:
    """Middles of the bins."""
    return (np.arange(bins) + 0.5) / bins


def draw_profiles(figure: Figure, table: by_position.RowTable) -> Rows:
    """A line for each outcome over the whole training."""
    rows: Rows = [["outcome", "position", "mean", "low", "high", "rows", "prompts"]]
    plot = figure.subplots()
    plot.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
    positions = _positions(table.profile.shape[1])
    for outcome, means in by_position.profiles(table).items():
        label, style = f"{data.OUTCOME_WORDS[outcome]} ({means.rows} responses)", "--" if outcome == "wrong" else "-"
        plot.plot(positions, means.mean, style, color=OUTCOME_COLOURS[outcome], linewidth=1.3, label=label)
        plot.fill_between(positions, means.low, means.high, color=OUTCOME_COLOURS[outcome], alpha=0.2, linewidth=0)
        for values in zip(positions, means.mean, means.low, means.high, strict=True):
            rows.append([outcome or "unknown", *map(_number, values), means.rows, means.groups])
    plot.set(xlabel="position in the reasoning", ylabel="mean weight", xlim=(0, 1))
    plot.legend(fontsize=7)
    return rows


def draw_heat_map(figure: Figure, table: by_position.RowTable) -> Rows:
    """Steps from left to right, positions upwards, colours by the weight's ratio to 1 as in the other views."""
    from matplotlib.colors import ListedColormap

    steps, weights_SK, counts = by_position.by_step(table)
    plot = figure.subplots()
    places = colours.weight_place(weights_SK)
    known = np.abs(places[np.isfinite(places)])
    # Means lie near 1: the scale ends at the farthest of them.
    limit = float(known.max()) if known.size and known.max() > 0 else 1.0
    scale = ListedColormap(colours.diverging(257))
    scale.set_bad("#d9d9d9")
    count, bins = weights_SK.shape
    edges = np.arange(count + 1), np.linspace(0, 1, bins + 1)
    shown = plot.pcolormesh(*edges, np.ma.masked_invalid(places).T, cmap=scale, vmin=-limit, vmax=limit)
    every = max(1, math.ceil(count / 8))
    plot.set_xticks(np.arange(0, count, every) + 0.5, [str(step) for step in steps[::every]])
    plot.set(xlabel="step", ylabel="position in the reasoning", title="Mean weight of the responses with scores")
    plot.grid(False)
    ticks = np.linspace(-limit, limit, 5)
    bar = figure.colorbar(shown, ax=plot, ticks=ticks)
    bar.ax.set_yticklabels([f"{colours.WEIGHT_LIMIT**tick:.2f}" for tick in ticks])
    bar.set_label("weight (grey: no response)")
    rows: Rows = [["step", "position", "weight", "rows"]]
    for step, weights_K, of_step in zip(steps, weights_SK, counts, strict=True):
        cells = zip(_positions(bins), weights_K, strict=True)
        rows += [[step, _number(position), _number(weight), of_step] for position, weight in cells]
    return rows
