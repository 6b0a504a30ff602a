"""A response as a figure for a paper: its text, and beneath each line a strip of colours for each method and for what arrived.

python -m grail_advantage.report RUN --figure methods --output methods.pdf
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure

from grail_advantage.dump import DumpHeader, DumpRow, write_whole
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.run import shown_values
from grail_advantage.view.turns import range_of

COLOURS = LinearSegmentedColormap.from_list("weights", ["#6aa5e8", "#fafafa", "#e8935a"])
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7,
    "text.parse_math": False,  # a model's text has dollars
    "hatch.linewidth": 0.5,
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text, and equal figures are equal files
    "svg.hashsalt": "grail_advantage",
    "pdf.fonttype": 42,
}
_FONTS = ["DejaVu Sans Mono", "DejaVu Sans"]
_CELL, _LINE, _STRIP, _MARGIN = 4.82, 11, 9, 5
"""Points: width of a character, height of a line of text and of a strip, margin."""
_LINES = 24
"""Of a longer response, the lines from the beginning and around the incorrect step, or the end."""


def write_figure(header: DumpHeader, row: DumpRow, path: Path, width: float = 6.75) -> None:
    """Write the figure of a response as SVG, PDF or PNG, by the file's suffix.

    Args:
        header: of its file.
        row: of a dump.
        path: of the figure.
        width: inches.

    Raises:
        ValueError: another suffix, or a width that leaves no room for the text.
    """
    if path.suffix not in (".svg", ".pdf", ".png"):
        raise ValueError(f"--output {path}: the name of a figure's file ends in .svg, .pdf or .png")
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        draw(header, row, width).savefig(file, format=path.suffix[1:], metadata=metadata)
    write_whole(path, file.getvalue())


def draw(header: DumpHeader, row: DumpRow, width: float) -> Figure:
    """The figure; see :func:`write_figure`. Lengths are points, 1/72 inch."""
    name, _ = shown_values(row)
    strips = {method: shown_values(row, method)[1] for method in row.methods} or {header.method: shown_values(row)[1]}
    if row.received_T is not None:
        base_T = row.base_advantage_T if name == "weight" else np.ones(len(row))
        strips[f"received ({next(iter(strips))})"] = row.received_T / np.where(base_T == 0, np.nan, base_T)
    left = 2 * _MARGIN + 4 * max(map(len, strips))
    columns = int((72 * width - left - _MARGIN) / _CELL)
    if columns < 20:
        raise ValueError(f"--width {width:g} leaves {max(0, columns)} characters a line beside the names; give more")
    named = zip(row.token_ids_T.tolist(), row.tokens, strict=True)
    texts = [visible(text or header.special_tokens.get(token, "\N{DOTTED CIRCLE}")) for token, text in named]
    wrong = range(*(range_of(row.labels.get("wrong_step"), len(row)) or (0, 0)))
    lines = list(wrap(texts, columns))
    if len(lines) > _LINES:
        half = _LINES // 2
        marked = next(
            (number for number, line in enumerate(lines) if any(piece[0] in wrong for piece in line)), len(lines)
        )
        after = min(max(half, marked - 1), len(lines) - half)
        lines = [*lines[:half], *lines[after : after + half]]
    block = _LINE + _STRIP * len(strips) + 5
    wide, high = 72 * width, block * len(lines) + 30
    figure = Figure(figsize=(width, high / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(high, 0))
    axes.axis("off")

    pieces = []  # token, left, right, top
    for number, line in enumerate(lines):
        top = _MARGIN + block * number
        for token, start, text in line:
            x = left + _CELL * start
            pieces.append((token, x, x + _CELL * len(text), top))
            ink, slant = ("#15171c", "normal") if row.mask_T[token] and row.tokens[token] else ("#646974", "italic")
            axes.text(x, top + 8, text.rstrip(" "), family=_FONTS, size=8, color=ink, style=slant)
        for place, method in enumerate(strips):
            axes.text(left - _MARGIN, top + _LINE + _STRIP * (place + 0.5), method, ha="right", va="center_baseline")

    largest = max(float(np.nanmax(np.abs(values_T), initial=0)) for values_T in strips.values())
    limit = 4.0 if name == "weight" else largest or 1.0
    norm = LogNorm(1 / limit, limit, clip=True) if name == "weight" else Normalize(-limit, limit, clip=True)
    tokens = [token for token, *_ in pieces]
    for place, values_T in enumerate(strips.values()):
        boxes = [_box(x, end, top + _LINE + _STRIP * place, _STRIP - 1) for _, x, end, top in pieces]
        shown = values_T[tokens] if name != "weight" else np.maximum(values_T[tokens], 1e-6)
        colours = COLOURS(norm(np.ma.masked_invalid(shown)))
        colours[~np.isfinite(shown)] = 0
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="#c3c6cd", linewidths=0.3))
    clips = np.zeros(len(row)) if row.clipped_T is None else row.clipped_T
    clipped = [box for box, token in zip(boxes, tokens, strict=True) if clips[token] > 0]
    answered = range(row.span.start, row.span.end) if row.span else range(0)
    answer, error = (
        [_box(x, end, top + 9.5, 1.2) for token, x, end, top in pieces if token in marked]
        for marked in (answered, wrong)
    )
    x = _legend(axes, name, limit, high - 12)
    for label, own, look in (
        ("answer", answer, {"facecolors": "#0a666e"}),
        ("incorrect step", error, {"facecolors": "#b3400a"}),
        ("clipped", clipped, {"facecolors": "none", "edgecolors": "#646974", "hatch": "//////", "linewidths": 0}),
    ):
        if own:
            sample = _box(x, x + 12, high - 16, 5)
            axes.add_collection(PolyCollection([*own, sample], **look))
            axes.text(x + 15, high - 11, label)
            x += 24 + 4 * len(label)
    return figure


def wrap(texts: Sequence[str], columns: int) -> Iterator[list[tuple[int, int, str]]]:
    """Tokens as lines of so many characters, broken at line breaks and between tokens, a longer token within; each piece has
    its token, the column where it begins, and its text."""
    line: list[tuple[int, int, str]] = []
    for token, text in enumerate(texts):
        for part in text.splitlines(keepends=True):
            for piece in (part[start : start + columns] for start in range(0, len(part), columns)):
                at = line[-1][1] + len(line[-1][2]) if line else 0
                if at + len(piece.rstrip()) > columns:
                    yield line
                    line, at = [], 0
                line.append((token, at, piece.rstrip("\n")))
            if part.endswith("\n"):
                yield line
                line = []
    if line:
        yield line


def _legend(axes: matplotlib.axes.Axes, name: str, limit: float, top: float) -> float:
    """The scale of colours; where the next entry begins."""
    axes.text(_MARGIN, top + 1, name)
    left = 2 * _MARGIN + 4 * len(name)
    cells = [_box(left + 5 * k, left + 5 * k + 5, top - 4, 5) for k in range(17)]
    axes.add_collection(PolyCollection(cells, facecolors=COLOURS(np.linspace(0, 1, 17))))
    for share in (0, 0.5, 1):
        value = limit ** (2 * share - 1) if name == "weight" else limit * (2 * share - 1)
        axes.text(left + 85 * share, top + 10, f"{value:.2g}", ha="center", size=6)
    return left + 100


def _box(left: float, right: float, top: float, height: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, top + height), (left, top + height)]
