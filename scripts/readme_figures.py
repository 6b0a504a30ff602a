"""Draw the README's figures and its table from the results in the repository.

    python scripts/readme_figures.py [--write README.md]

- the table: the comparisons of the second study, once they are complete; its plot is the report's own;
- ``docs/images/cost.png``: ``benchmarks/results/neutral_rows-cpu.json``;
- ``docs/images/learning_curve.png``: ``docs/images/learning_curve.csv``, which ``--runs GRAIL UNIFORM`` takes from the folders
  of two runs of the CPU example.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_training_step import GRPO, ratios  # noqa: E402
from benchmarks.report import variants  # noqa: E402
from recipe.marked_text import write_marked  # noqa: E402
from recipe.run_report import read_steps  # noqa: E402
from study.plan import StudyPlan  # noqa: E402
from study.report import Results, contrast_table  # noqa: E402
from study.work import Files  # noqa: E402

IMAGES = ROOT / "docs" / "images"
STUDY = ROOT / "docs" / "study2"
COSTS = ROOT / "benchmarks" / "results" / "neutral_rows-cpu.json"
CURVE = IMAGES / "learning_curve.csv"
COST_ARMS = {
    "GRAIL": "GRAIL, every row",
    "GRAIL, skipping": "GRAIL, without the rows that train nothing",
    "": "uniform, without them",
}
CURVE_ARMS = ("GRAIL", "uniform")
INK, ACCENT, MUTED, WARM = "#24292f", "#0b6e4f", "#9aa5b1", "#c8553d"


def table() -> str:
    """Markdown."""
    return "\n".join(contrast_table(Results.read(StudyPlan(), Files(STUDY))))


def cost_ratios(results: dict[str, Any], arm: str, epochs: int) -> dict[float, float]:
    """By the share of rows without an advantage, the training side of a step without gradient checkpointing, as a multiple of
    verl's GRPO: the median of the repeats. No arm stands for the one that leaves rows out and has no weights."""
    return {
        run["neutral_rows"] / results["setup"]["rows"]: median(
            ratios(run["repeats"], arm or variants(run)[0], GRPO, epochs)
        )
        for run in results["runs"]
        if run["checkpointing"] == "off"
    }


def draw_costs(results: dict[str, Any], path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(7, 2.8), dpi=160, sharey=True)
    for axes, epochs in zip(panels, results["epochs"], strict=True):
        axes.axhline(1, color=INK, linewidth=0.8, label="GRPO of verl, every row")
        for (arm, label), colour in zip(COST_ARMS.items(), (WARM, ACCENT, MUTED), strict=True):
            ratios = cost_ratios(results, arm, epochs)
            axes.plot([100 * share for share in ratios], ratios.values(), color=colour, marker="o", label=label)
        axes.set(xlabel="% of rows without an advantage", ylim=(0, 1.25), xticks=[0, 25, 50, 75])
        axes.set_title(f"{epochs} epoch{'s' if epochs > 1 else ''} of updates", fontsize=9)
        _finish(axes)
    panels[0].set_ylabel("training side of a step, x GRPO", fontsize=8)
    panels[0].legend(frameon=False, fontsize=7, loc="lower left")
    _save(figure, path)


def draw_curve(path: Path) -> None:
    with CURVE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 2.8), dpi=160)
    for method, colour in zip(CURVE_ARMS, (ACCENT, MUTED), strict=True):
        for name, style in (("accuracy", {"marker": "o"}), ("reward", {"linewidth": 0.8, "linestyle": ":"})):
            points = [(int(r["step"]), float(r[name])) for r in rows if r["method"] == method and r[name]]
            label = f"{method}, {'held-out accuracy' if name == 'accuracy' else 'training reward'}"
            axes.plot(*zip(*points, strict=True), color=colour, label=label, **style)
    steps = {int(row["step"]) for row in rows}
    axes.set(
        xlabel="training step (rollout batch of 256 responses)",
        ylabel="share right",
        ylim=(0, 1),
        xticks=range(0, max(steps) + 1, 2),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _finish(axes)
    _save(figure, path)


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def store_curves(runs: list[Path]) -> None:
    """Keep the curves of runs of the CPU example, one a method of ``CURVE_ARMS``."""
    with CURVE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "step", "reward", "accuracy"])
        for method, run in zip(CURVE_ARMS, runs, strict=True):
            for step in read_steps(run):
                writer.writerow([method, step.number, step.reward, step.accuracy])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs=2, metavar=CURVE_ARMS, help="folders of runs of the CPU example")
    parser.add_argument("--write", type=Path, help="page with the marker study, for the table")
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.runs:
        store_curves(arguments.runs)
    results = json.loads(COSTS.read_text(encoding="utf-8"))
    draw_costs(results, arguments.images / "cost.png")
    draw_curve(arguments.images / "learning_curve.png")
    if arguments.write:
        write_marked(arguments.write, "study", table())


if __name__ == "__main__":
    main()
