"""A response as a figure for a paper: its text, and beneath each line a strip of colours for each method.

python -m grail_advantage.report RUN --figure methods --output methods.pdf
"""

import io
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure

from grail_advantage.dump import DumpHeader, write_whole
from grail_advantage.text_io import visible
from grail_advantage.view.page import range_of
from grail_advantage.view.profile import by_method, flat
from grail_advantage.view.run import Run

COLOURS = LinearSegmentedColormap.from_list(
    "weights", ["#6aa5e8", "#fafafa", "#e8935a"]
).with_extremes(bad="none")
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7,
    "text.parse_math": False,  # a model's text has dollars
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text, and equal figures are equal files
    "svg.hashsalt": "grail_advantage",
    "pdf.fonttype": 42,
}
_FONTS = ["DejaVu Sans Mono", "DejaVu Sans"]
# points: a character's width, heights of a line and a strip, margin
_CELL = 4.82
_LINE = 11
_STRIP = 9
_MARGIN = 5
_LINES = 24  # most lines: of a longer response the first half, and the rest around the incorrect step or at the end


def write_figure(
    run: Run, step: int | None, row: int | None, path: Path, width: float = 6.75
) -> None:
    """Write the figure of a response of a run as SVG, PDF or PNG, by the file's suffix, so many inches wide. ValueError:
    another suffix, a width that leaves no room for the text, or no such response."""
    if path.suffix not in (".svg", ".pdf", ".png"):
        raise ValueError(f"--output {path}: the name of a figure's file ends in .svg, .pdf or .png")
    # Without a date, so that equal figures are equal files.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    content = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        draw(*find_response(run, step, row), width).savefig(
            content, format=path.suffix[1:], metadata=metadata
        )
    write_whole(path, content.getvalue())


def find_response(run: Run, step: int | None, row: int | None) -> tuple[DumpHeader, pa.Table]:
    """A response of the dump, as the header of its file and a table of one row: of the last step by default, and of the
    first response with scores, else the first. ``row``: its place in the step's batch. ValueError: there is none."""
    files = [file for file in run.dump.files if step in (None, file.step)][-1:]
    rows = [response for file in files for response in file.table(["row", "no_scores"]).to_pylist()]
    places = [place for place, response in enumerate(rows) if row in (None, response["row"])]
    header = files[0].header if places else None
    if header is None:
        listed = [response["row"] for response in rows]
        raise ValueError(
            f"{run.folder} has no response of --step {step} --row {row}; it has steps {run.dump.steps}, and of that step "
            f"responses {listed}"
        )
    # False comes before True: the first with scores, else the first.
    place = min(places, key=lambda place: rows[place]["no_scores"] is not None)
    return header, files[0].table().slice(place, 1)


def draw(header: DumpHeader, table: pa.Table, width: float) -> Figure:
    """The figure; see :func:`write_figure`. Lengths are points, 1/72 inch."""
    (row,) = table.to_pylist()
    methods, signed = by_method(header, table)
    strips = {}
    for method, rows in methods.items():
        values, _ = flat(rows["advantage" if method in signed else "weight"])
        strips[method] = np.where(row["mask"] & np.isfinite(values), values, np.nan)
    name = "advantage" if next(iter(methods)) in signed else "weight"
    indent = 2 * _MARGIN + 4 * max(map(len, strips))
    columns = int((72 * width - indent - _MARGIN) / _CELL)
    if columns < 20:
        raise ValueError(
            f"--width {width:g} leaves {max(0, columns)} characters a line beside the names; give more"
        )
    # A token without text and name shows that it is there.
    texts = [
        visible(text or header.special_tokens.get(token, "\N{DOTTED CIRCLE}"), breaks=True)
        for token, text in zip(row["token_ids"], row["tokens"], strict=True)
    ]
    labels = json.loads(row["labels"] or "{}")
    wrong = range(*(range_of(labels.get("wrong_step"), len(texts)) or (0, 0)))
    lines = list(wrap(texts, columns))
    half = _LINES // 2
    if len(lines) > _LINES:
        holds = (
            number for number, line in enumerate(lines) if any(piece[0] in wrong for piece in line)
        )
        # The line before the incorrect step, so that it begins in sight; without one the end.
        second = min(max(half, next(holds, len(lines)) - 1), len(lines) - half)
        lines = lines[:half] + lines[second : second + half]
    block = _LINE + _STRIP * len(strips) + 5
    high = block * len(lines) + 30
    figure = Figure(figsize=(width, high / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 72 * width), ylim=(high, 0))
    axes.axis("off")

    pieces = []  # token, left, width, top
    for number, line in enumerate(lines):
        top = _MARGIN + block * number
        for token, start, text in line:
            x = indent + _CELL * start
            pieces.append((token, x, _CELL * len(text), top))
            trains = row["mask"][token] and row["tokens"][token]
            axes.text(
                x,
                top + 8,
                text.rstrip(" "),
                family=_FONTS,
                size=8,
                color="#15171c" if trains else "#646974",
                style="normal" if trains else "italic",
            )
        for place, method in enumerate(strips):
            middle = top + _LINE + _STRIP * (place + 0.5)
            axes.text(indent - _MARGIN, middle, method, ha="right", va="center_baseline")

    norm: Normalize = LogNorm(1 / 4, 4, clip=True)
    if name == "advantage":
        limit: float = np.nanmax(np.abs(list(strips.values())), initial=0) or 1.0
        norm = Normalize(-limit, limit, clip=True)
    tokens, starts, widths, tops = (np.array(column) for column in zip(*pieces, strict=True))
    bars = partial(axes.bar, align="edge", linewidth=0)
    for place, values_T in enumerate(strips.values()):
        colours = COLOURS(norm(np.ma.masked_invalid(values_T[tokens])))
        bottom = tops + _LINE + _STRIP * place
        bars(
            starts,
            _STRIP - 1,
            widths,
            bottom,
            color=colours,
            edgecolor="#c3c6cd",
            linewidth=0.3,
        )

    axes.text(_MARGIN, high - 11, name)
    x = 2 * _MARGIN + 4 * len(name)
    bars(x + 5 * np.arange(17), 5, 5, high - 16, color=COLOURS(np.linspace(0, 1, 17)))
    for share in (0, 0.5, 1):
        value = f"{norm.inverse(share):.2g}"
        axes.text(x + 85 * share, high - 2, value, ha="center", size=6)
    answer = range(row["span"][0], row["span"][3]) if row["span"] else range(0)
    for label, marked, colour in (
        ("answer", answer, "#0a666e"),
        ("incorrect step", wrong, "#b3400a"),
    ):
        marked_N = np.isin(tokens, list(marked))
        if marked_N.any():
            bars(starts[marked_N], 1.2, widths[marked_N], tops[marked_N] + 9.5, color=colour)
            bars(x + 100, 5, 12, high - 16, color=colour)
            axes.text(x + 115, high - 11, label)
            x += 24 + 4 * len(label)
    return figure


def wrap(texts: Sequence[str], columns: int) -> Iterator[list[tuple[int, int, str]]]:
    """Tokens as lines of so many characters, broken at line breaks and between tokens, a longer token within; each piece has
    its token, the column where it begins, and its text."""
    line: list[tuple[int, int, str]] = []
    column = 0
    for token, text in enumerate(texts):
        for part in text.splitlines(keepends=True):
            for start in range(0, len(part), columns):
                piece = part[start : start + columns]
                # Blanks at the end may stand in the margin.
                if column + len(piece.rstrip()) > columns:
                    yield line
                    line = []
                    column = 0
                drawn = piece.rstrip("\n")
                line.append((token, column, drawn))
                column += len(drawn)
            if part.endswith("\n"):
                yield line
                line = []
                column = 0
    if line:
        yield line
