"""Draw the README's learning curve, ``docs/images/learning_curve.png``, from ``docs/images/learning_curve.csv``, which ``--runs
GRAIL UNIFORM`` takes from the folders of two runs of the CPU example.

    python scripts/readme_figures.py
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipe.run_report import read_steps  # noqa: E402

IMAGES = ROOT / "docs" / "images"
CURVE = IMAGES / "learning_curve.csv"
CURVE_ARMS = ("GRAIL", "uniform")
ACCENT, MUTED = "#0b6e4f", "#9aa5b1"


def draw_curve(path: Path) -> None:
    """Held-out accuracy and reward of both runs, as a picture."""
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
        ylabel="share correct",
        ylim=(0, 1),
        xticks=range(0, max(steps) + 1, 2),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
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
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.runs:
        store_curves(arguments.runs)
    draw_curve(arguments.images / "learning_curve.png")


if __name__ == "__main__":
    main()
