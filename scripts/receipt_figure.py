"""Draw ``docs/images/receipt_clipped.png``: the weight of a run's answer tokens, what they received after clipping, and
how many were clipped, epoch by epoch.

    python scripts/receipt_figure.py RUN [--output FILE]

RUN is one of GRAIL over several epochs, with a token dump. Prints the figures that it draws.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from grail_advantage.view.dump.files import DumpRow  # noqa: E402
from grail_advantage.view.page import data  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "receipt_clipped.png"
COLOURS = {"answer": "#c0561a", "reasoning": "#1f6fb5"}
NAMES = {0: "first update", 1: "second update"}


def kinds(row: DumpRow) -> dict[str, np.ndarray]:
    """Which tokens with an advantage are the answer's, and which come before it."""
    assert row.span is not None and row.advantage_T is not None
    places = np.arange(len(row))
    trains = row.mask_T & (row.advantage_T != 0)
    answer = (places >= row.span.content_start) & (places < row.span.content_end)
    return {"answer": trains & answer, "reasoning": trains & (places < row.span.start)}


def measure(rows: list[DumpRow]) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """By update and kind of token: ``intended``, the mean weight (|token advantage| over |advantage of the response|), and for
    each epoch ``received``, the same of what arrived, and ``clipped``, the share of the tokens."""
    sums: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
    for row in rows:
        if row.received is None or not len(row.received.updates) or row.span is None:
            continue
        assert row.advantage_T is not None and row.base_advantage_T is not None
        for kind, at_T in kinds(row).items():
            base = np.abs(row.base_advantage_T[at_T])
            arrived = row.received.by_update_KT[:, at_T] / base
            stopped = arrived == 0
            columns = np.concatenate([np.abs(row.advantage_T[at_T] / base)[None], np.abs(arrived), stopped])
            sums[row.update, kind].append(columns)
    measured = {}
    for key, parts in sums.items():
        joined = np.concatenate(parts, axis=1)
        epochs = (len(joined) - 1) // 2
        measured[key] = {
            "tokens": np.array(joined.shape[1]),
            "intended": joined[0].mean(),
            "received": joined[1 : 1 + epochs].mean(axis=1),
            "clipped": joined[1 + epochs :].mean(axis=1),
        }
    return measured


def draw(measured: dict[tuple[int, str], dict[str, np.ndarray]], path: Path) -> None:
    """Two panels: the share of clipped tokens, and intended and received weight."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.2), dpi=160)
    for (update, kind), of in sorted(measured.items()):
        epochs = np.arange(1, len(of["received"]) + 1)
        style = {"color": COLOURS[kind], "marker": "o", "markersize": 4, "linestyle": "-" if update == 0 else "--"}
        label = f"{kind}, {NAMES.get(update, f'update {update + 1}')}"
        left.plot(epochs, 100 * of["clipped"], label=label, **style)
        right.plot(epochs, of["received"], **style)
        if update == 0:
            right.axhline(of["intended"], color=COLOURS[kind], linewidth=0.9, linestyle=":")
            right.annotate(
                f"{kind}: intended", (epochs[0], of["intended"]), (0, 3), textcoords="offset points", fontsize=7
            )
    left.set(xlabel="epoch", ylabel="tokens clipped, %", xticks=epochs, ylim=(0, None))
    right.set(xlabel="epoch", ylabel="mean weight of a token", xticks=epochs, ylim=(0, 5.6))
    left.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    run = data.open_run(arguments.run)
    measured = measure(list(run.dump or ()))
    if not measured:
        raise SystemExit(f"{arguments.run} has no responses with an answer and a receipt")
    for (update, kind), of in sorted(measured.items()):
        received = ", ".join(f"{value:.2f}" for value in of["received"])
        clipped = ", ".join(f"{100 * value:.1f} %" for value in of["clipped"])
        weights = f"intended {of['intended']:.2f}, received {received}"
        print(f"update {update}, {kind}: {of['tokens']} tokens, {weights}, clipped {clipped}")
    draw(measured, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
