"""Draw the README's figures and its table from the results in the repository.

    python scripts/readme_figures.py [--write README.md]

- the table: the comparisons of the second study, once they are complete; its plot is the report's own;
- ``docs/images/cost.png``: ``benchmarks/results/training_step-cpu.json``;
- ``docs/images/tokens.png``: with ``--tokens FOLDER KEY``, a row of an analysis, weighed by several methods (needs Chromium);
- ``docs/images/learning_curve.png``: ``docs/images/learning_curve.csv``, which ``--run FOLDER`` takes from a run of the CPU
  example.
"""

from __future__ import annotations

import argparse
import csv
import html
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from report import Step  # noqa: E402

from grail_advantage.report.notebook import token_html  # noqa: E402
from grail_advantage.token_dump import read_dump  # noqa: E402
from recipe.marked_text import write_marked  # noqa: E402
from recipe.run_report import read_steps  # noqa: E402
from study.plan import StudyPlan  # noqa: E402
from study.report import Results, contrast_table  # noqa: E402
from study.work import Files  # noqa: E402
from tests.report.browser import launched  # noqa: E402

IMAGES = ROOT / "docs" / "images"
STUDY = ROOT / "docs" / "study2"
COSTS = ROOT / "benchmarks" / "results" / "training_step-cpu.json"
CURVE = IMAGES / "learning_curve.csv"
STAGES = {"old_log_probs": "old log-probabilities", "saliency": "pass of its own", "update": "update"}
COST_ARMS = {
    "GRPO": "uniform (GRPO)",
    "GRAIL official, fused": "GRAIL",
    "GRAIL official, separate": "GRAIL, pass of its own",
    "published procedure": "as the paper's code does it",
}
TOKEN_METHODS = {
    "grail": "GRAIL",
    "grail:preset=robust": "GRAIL, preset robust",
    "oar_g:variant=grail_port": "OAR-G (GRAIL's authors' variant)",
    "surprisal": "surprisal: weight 1 on the least likely token, 0 on all others",
}
TOKENS_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 14px 18px; width: 1000px; background: white; color: #24292f; font: 14px/1.5 sans-serif }}
h1 {{ font-size: 15px; margin: 0; font-weight: normal }} h2 {{ font-size: 14px; margin: 12px 0 2px }}
main {{ display: grid; grid-template-columns: 1fr 1fr; gap: 0 16px }}
</style><h1>{head}</h1><main>{parts}</main>"""
INK, ACCENT, MUTED, WARM = "#24292f", "#0b6e4f", "#9aa5b1", "#c8553d"


def table() -> str:
    """Markdown."""
    return "\n".join(contrast_table(Results.read(StudyPlan(), Files(STUDY))))


def stage_seconds(results: dict[str, Any], arm: str) -> dict[str, float]:
    """Median processor time of a step's stages with one epoch, without gradient checkpointing, as multiples of GRPO's step.

    The update is the same work in every arm, so all measurements of it count together, as in ``benchmarks/report.py``.
    """
    run = next(run for run in results["runs"] if run["checkpointing"] == "off")
    step = Step(run, results["setup"])
    whole = step.forward + step.update
    own = step.weighing(arm, 1)
    pass_of_its_own = 0.0 if arm.endswith("fused") else own
    return {
        "old_log_probs": (step.forward + own - pass_of_its_own) / whole,
        "saliency": pass_of_its_own / whole,
        "update": step.update / whole,
    }


def draw_costs(results: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 2.4), dpi=160)
    labels = list(COST_ARMS.values())[::-1]
    left = np.zeros(len(labels))
    for stage, colour in zip(STAGES, (MUTED, WARM, ACCENT), strict=True):
        parts = np.array([stage_seconds(results, arm)[stage] for arm in reversed(COST_ARMS)])
        axes.barh(labels, parts, left=left, color=colour, label=STAGES[stage], height=0.6)
        left += parts
    for place, whole in enumerate(left):
        axes.text(whole + 0.01, place, f"{whole:.2f}", va="center", fontsize=8, color=INK)
    axes.set_xlabel("training side of a step, 1 epoch, multiples of uniform's processor time")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    _finish(figure, axes, path)


def draw_curve(path: Path) -> None:
    with CURVE.open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    figure, axes = pyplot.subplots(figsize=(7, 2.8), dpi=160)
    trained = [row for row in rows if "reward" in row]
    validated = [row for row in rows if "accuracy" in row]
    axes.plot([r["step"] for r in trained], [r["reward"] for r in trained], color=MUTED, label="training reward")
    axes.plot(
        [r["step"] for r in validated],
        [r["accuracy"] for r in validated],
        color=ACCENT,
        marker="o",
        label="held-out accuracy, sampled",
    )
    axes.set(
        xlabel="training step (rollout batch of 256 responses)",
        ylabel="share right",
        ylim=(0, 1),
        xticks=range(0, len(rows), 5),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _finish(figure, axes, path)


def draw_tokens(folder: Path, key: str, path: Path) -> None:
    """A row of an analysis with several methods, as a notebook shows it."""
    row = next(row for row in read_dump(folder) if row.key == key)
    parts = [
        f"<section><h2>{html.escape(label)}</h2>"
        f"{token_html(row.tokens, row.methods[name].weight_T, name='weight')}</section>"
        for name, label in TOKEN_METHODS.items()
    ]
    head = f"The right answer is {row.gold}. Each method multiplies this response's (negative) advantage by:"
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1040, "height": 600}, device_scale_factor=1.6)
        page.set_content(TOKENS_PAGE.format(head=html.escape(head), parts="".join(parts)))
        page.locator("body").screenshot(path=path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    figure.tight_layout()
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def store_curve(run: Path) -> None:
    """Keep the curve of a run of the CPU example."""
    with CURVE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "reward", "accuracy"])
        for step in read_steps(run):
            writer.writerow([step.number, step.reward, step.accuracy])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a run of the CPU example")
    parser.add_argument("--tokens", nargs=2, metavar=("FOLDER", "KEY"), help="dump of an analysis, and the row")
    parser.add_argument("--write", type=Path, help="page with the marker study, for the table")
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.run:
        store_curve(arguments.run)
    results = json.loads(COSTS.read_text(encoding="utf-8"))
    draw_costs(results, arguments.images / "cost.png")
    draw_curve(arguments.images / "learning_curve.png")
    if arguments.tokens:
        draw_tokens(Path(arguments.tokens[0]), arguments.tokens[1], arguments.images / "tokens.png")
    if arguments.write:
        write_marked(arguments.write, "study", table())


if __name__ == "__main__":
    main()
