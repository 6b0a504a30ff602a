"""Figures for papers: a response's tokens on colours by weight, under one method or each; mean weights by place; and what
arrived at tokens against what was intended. Values, scales and means are the report's. Lengths are points, 1/72 inch.

python -m grail_advantage.report RUN --figure methods --output methods.pdf
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.textpath import TextPath

from grail_advantage.dump import DumpHeader, DumpRow, write_whole
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.lines import kept, wrap
from grail_advantage.view.page import by_position, colours, data, index, turns
from grail_advantage.view.page.page import ROLLOUTS
from grail_advantage.view.terminal import find_row

FORMATS = (".svg", ".pdf", ".png")
_STYLE = ["default", Path(__file__).with_suffix(".mplstyle")]
_FONTS, _SIZE, _CELL = ["DejaVu Sans Mono", "DejaVu Sans", "monospace"], 8, 8 * 0.602
_MARGIN, _LINE, _STRIP, _HIGHEST = 5, 11, 8, 620
_INK, _PALE, _EDGE, _ANSWER, _CLIPPED = "#15171c", "#646974", "#c3c6cd", "#0a666e", "#b3400a"
"""As on the page."""
_TICKS = {4.0: "≤¼ ½ 1 2 ≥4", 2.0: "≤½ 1 ≥2", 1.25: "≤⅘ 1 ≥1¼"}
_POINTS = 20_000
"""More of them are an image within the figure."""


def write_figure(run: data.Run, kind: str, path: Path, **options: Any) -> str:
    """Write what :func:`draw` gives as SVG, PDF or PNG, by the file's suffix; equal figures are equal files.

    Returns:
        The characters that the fonts lack, which an SVG's viewer draws in its own.

    Raises:
        ValueError: another suffix, or those of :func:`draw`.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--output {path}: the name of a figure's file ends in {', '.join(FORMATS)}")
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    file = io.BytesIO()
    with matplotlib.style.context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = draw(run, kind, **options)
        figure.savefig(file, format=path.suffix[1:], metadata=metadata)
        known = {chr(code) for font in _FONTS for code in get_font(findfont(font)).get_charmap()} | {"\n"}
    write_whole(path, file.getvalue())
    return "".join(sorted({*"".join(text.get_text() for text in figure.findobj(Text))} - known))


def draw(
    run: data.Run,
    kind: str,
    *,
    width: float,
    step: int | None = None,
    row: int | None = None,
    mark: tuple[int, int] | None = None,
) -> Figure:
    """A figure.

    Args:
        run: of which.
        kind: ``response``, ``methods``, ``positions`` or ``received``.
        width: inches.
        step: by default as :func:`grail_advantage.view.terminal.find_row` chooses.
        row: likewise; of ``received`` by default all of the step.
        mark: the incorrect step, a half-open range of characters of the response, in place of the dump's label.

    Raises:
        ValueError: the run has nothing to draw; the message says what is missing.
    """
    if run.dump is None:
        raise ValueError(f"{run.folder} has no token dump (algorithm.token_dump.folder); --figure draws its responses")
    if not 2 <= width <= 40:
        raise ValueError(f"--width {width:g} must be from 2 to 40 inches")
    with matplotlib.style.context(_STYLE):
        if kind == "received":
            return _received(run, width, step, row)
        selection = index.Selection()
        tables = selection.read([run], ROLLOUTS)
        selection.draw(math.inf)
        methods = selection.methods(run.header)
        if kind == "positions":
            shown = index.positions(tables, methods, [selection.given_by(0, methods)])
            return _positions(shown, data.outcome_words(selection.verdicts.field), width)
        header, response = find_row(run.dump, step, row)
        name = selection.overlays(1, methods)[0]
        scale = _Scale(name, selection.index()["limits"][name])
        strips = {method: values(response, method, name) for method in methods[: 1 if kind == "response" else None]}
        return _tokens(header, response, strips, scale, width, _marked(response, mark), alone=kind == "response")


# ------------------------------------------------------------------------------------------------------------------- tokens


class _Scale(NamedTuple):
    """Colours of weights or advantages, as on the page."""

    name: str
    limit: float

    @property
    def mappable(self) -> ScalarMappable:
        weights, signed = LogNorm(1 / self.limit, self.limit, clip=True), Normalize(-self.limit, self.limit, clip=True)
        return ScalarMappable(weights if self.name == "weight" else signed, ListedColormap(colours.diverging()))

    @property
    def ticks(self) -> tuple[Sequence[float], Sequence[str]]:
        if self.name == "weight":
            texts = _TICKS[self.limit].split()
            return np.geomspace(1 / self.limit, self.limit, len(texts)).tolist(), texts
        return [-self.limit, 0, self.limit], [f"\N{MINUS SIGN}{self.limit:g}", "0", f"{self.limit:g}"]


def values(row: DumpRow, method: str, name: str) -> np.ndarray:
    """A method's weights or advantages, (T,); NaN where a token does not train."""
    source = row.methods.get(method, row)
    value_T, base_T = source.weight_T, np.nan if row.base_advantage_T is None else row.base_advantage_T
    if name == "advantage":
        value_T = value_T * base_T if source.advantage_T is None else source.advantage_T
    return np.where(row.mask_T & np.isfinite(value_T), value_T, np.nan)


def received(row: DumpRow, name: str) -> np.ndarray:
    """The advantages that arrived, (T,), or for ``weight`` these over the base advantage; NaN where that is 0 or unknown."""
    arrived_T = np.full(len(row), np.nan) if row.received_T is None else row.received_T
    if name == "weight":
        base_T = np.zeros(len(row)) if row.base_advantage_T is None else row.base_advantage_T
        arrived_T = np.divide(arrived_T, base_T, out=np.full(len(row), np.nan), where=base_T != 0)
    return np.where(row.mask_T | (arrived_T != 0), arrived_T, np.nan)


def _tokens(
    header: DumpHeader | None,
    row: DumpRow,
    strips: dict[str, np.ndarray],
    scale: _Scale,
    width: float,
    marked: range,
    alone: bool,
) -> Figure:
    """A response's text on one method's colours (``alone``); or beneath each line a strip for each method, and what arrived."""
    clipped_T: np.ndarray = np.zeros(len(row), dtype=bool)
    if not alone and row.received_T is not None:
        strips |= {f"received ({next(iter(strips))})": received(row, scale.name)}
        clipped_T = row.clipped_T > 0
    wide, left = 72 * width, _MARGIN if alone else 2 * _MARGIN + max(map(_width, strips))
    columns = int((wide - left - _MARGIN) / _CELL) - 1
    if columns < 20:
        raise ValueError(f"--width {width:g} leaves {max(0, columns)} characters a line beside the names; give more")
    special, named = header.special_tokens if header else {}, zip(row.token_ids_T.tolist(), row.tokens, strict=True)
    lines = wrap([visible(text or special.get(token, "\N{DOTTED CIRCLE}")) for token, text in named], columns)
    block = _LINE + 3 if alone else _LINE + 5 + (_STRIP + 1) * len(strips)
    shown = kept(lines, int(_HIGHEST / block), marked)
    hidden = {after: range(before + 1, after) for before, after in pairwise(shown) if after > before + 1}
    deep = _MARGIN + block * len(shown) + _LINE * len(hidden)
    high = deep + (22 if wide >= 360 else 36)
    figure = Figure(figsize=(wide / 72, high / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(high, 0))
    axes.axis("off")

    places: list[tuple[int, float, float, float]] = []  # token, left, right, top
    top: float = _MARGIN
    for number in shown:
        if number in hidden:
            count = len({piece.token for other in hidden[number] for piece in lines[other]})
            axes.text(left, top + 8, f"\N{HORIZONTAL ELLIPSIS} {count:,} tokens \N{HORIZONTAL ELLIPSIS}", color=_PALE)
            top += _LINE
        for token, start, end, text in lines[number]:
            places.append((token, left + start * _CELL, left + end * _CELL, top))
            x, own = left + (start + len(text) - len(text.lstrip(" "))) * _CELL, row.mask_T[token] and row.tokens[token]
            drawn = axes.text(x, top + 8.5, text.strip(" "), family=_FONTS, size=_SIZE, zorder=3)
            if not own:
                drawn.set(color=_PALE, style="italic")
        for number, name in enumerate([] if alone else strips):
            middle = top + _LINE + 3 + (_STRIP + 1) * number + _STRIP / 2
            axes.text(left - _MARGIN, middle, name, ha="right", va="center_baseline")
        top += block

    boxes, how = [], scale.mappable
    for number, (name, value_T) in enumerate(strips.items()):
        down, tall = (0, _LINE) if alone else (_LINE + 3 + (_STRIP + 1) * number, _STRIP)
        boxes = [_box(x, end, y + down, y + down + tall) for _, x, end, y in places]
        strip = PolyCollection(boxes, cmap=how.cmap, norm=how.norm, edgecolors=_EDGE, linewidths=0.3, label=name)
        strip.set_array(value_T[[token for token, *_ in places]])
        axes.add_collection(strip)
    marks = {}
    if row.span:
        bars = [_box(x, end, y + 11, y + 12.4) for token, x, end, y in places if row.span.start <= token < row.span.end]
        marks["answer"] = PolyCollection(bars, facecolors=_ANSWER, zorder=2)
    if marked:
        runs = [list(run) for (inside, _), run in groupby(places, lambda one: (one[0] in marked, one[3])) if inside]
        frames = [_box(run[0][1], run[-1][2], run[0][3] - 0.5, run[0][3] + block - (1 if alone else 4)) for run in runs]
        marks["incorrect step"] = PolyCollection(frames, facecolors="none", edgecolors=_INK, linewidths=0.9, zorder=4)
    if clipped_T.any():
        hatched = [box for box, (token, *_) in zip(boxes, places, strict=True) if clipped_T[token]]
        marks["clipped"] = PolyCollection(hatched, facecolors="none", edgecolors=_PALE, hatch="//////", linewidths=0)
    name = f"token {scale.name}{f' ({next(iter(strips))})' if alone else ''}"
    _legend(axes, wide, high, deep, scale, name, marks)
    return figure


def _legend(
    axes: Axes, wide: float, high: float, top: float, scale: _Scale, name: str, marks: Mapping[str, PolyCollection]
) -> None:
    """The scale of colours with its name, and the marks, which it also draws; in two lines where it is narrow."""
    axes.text(_MARGIN, top + 8, name)
    x, (ticks, texts) = 2 * _MARGIN + _width(name), scale.ticks
    place = axes.figure.add_axes((x / wide, 1 - (top + 9) / high, 80 / wide, 7 / high))
    bar = axes.figure.colorbar(scale.mappable, cax=place, orientation="horizontal", ticks=ticks)
    bar.set_ticklabels(texts)
    bar.minorticks_off()
    bar.outline.set_linewidth(0.3)
    bar.ax.tick_params(length=1.5, pad=1.5)
    x, top = (x + 100, top) if wide >= 360 else (_MARGIN, top + 19)
    for name, mark in marks.items():
        mark.set_label(name)
        sample = PolyCollection(
            [_box(x, x + 12, top + 7, top + 8.4) if name == "answer" else _box(x, x + 12, top + 2, top + 9)]
        )
        sample.update_from(mark)
        sample.set_label("")
        axes.text(x + 15, top + 8, name)
        for collection in (mark, sample):
            axes.add_collection(collection)
        x += 15 + _width(name) + 2 * _MARGIN


def _box(left: float, right: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _marked(row: DumpRow, mark: tuple[int, int] | None) -> range:
    """The tokens of the incorrect step."""
    if mark is None:
        label: Any = row.labels.get("wrong_step")
        return range(*label) if turns.is_range(label) else range(0)
    from grail_advantage.view.analysis import token_ranges

    (start, end), characters = mark, len(row.response)
    marked = range(*token_ranges([mark], row.tokens)[0])
    if not 0 <= start < end <= characters or not marked:
        raise ValueError(
            f"--mark {start}:{end} has no token's first character; the response has {characters} characters"
        )
    return marked


def _width(text: str) -> float:
    """Of a text in the figure's font."""
    return TextPath((0, 0), text, size=7, prop=FontProperties("DejaVu Sans")).get_extents().width


# -------------------------------------------------------------------------------------------------------------------- plots


def _positions(shown: Mapping[str, Any], words: Mapping[str, str], width: float) -> Figure:
    """A plot for each method."""
    if not shown:
        raise ValueError("no method gave the responses weights, so --figure positions has nothing to draw")
    across = min(len(shown), int(width / 1.5))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(width, 1.5 * down + 0.3), layout="constrained")
    places = (np.arange(by_position.BINS) + 0.5) * 100 / by_position.BINS
    for number, (method, position) in enumerate(shown.items()):
        axes = figure.add_subplot(down, across, number + 1, sharey=figure.axes[0] if number else None, title=method)
        axes.axhline(1, color=_EDGE, linewidth=0.8)
        for line in position["all"]:
            ink, dashes = (_ANSWER, "-") if line["outcome"] == "right" else (_INK, "--")
            label = f"{words[line['outcome']]} ({line['rows']:,})"
            axes.plot(places, line["mean"], dashes, color=ink, linewidth=1.2, label=label)
            axes.fill_between(places, line["low"], line["high"], color=ink, alpha=0.15, linewidth=0)
        axes.legend(handlelength=1.8, borderaxespad=0.2)
        axes.tick_params(labelleft=number % across == 0, labelbottom=number >= len(shown) - across)
        axes.set_xlim(0, 100)
        axes.set_xticks([0, 50, 100], ["start", "50 %", "answer"])
        for text, side in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=False):
            text.set(ha=side)
    figure.supylabel("mean weight, 95 %", fontsize=7)
    return figure


def _received(run: data.Run, width: float, step: int | None, row: int | None) -> Figure:
    """Tokens by what was intended and what arrived, over the run's receipt in words."""
    receipts, rows = index.receipt([run]), [one for one in run.dump or () if one.received_T is not None]
    last = max((one.step for one in rows), default=None) if step is None else step
    parts = [
        (one.advantage_T, one.received_T, one.clipped_T > 0)
        for one in rows
        if one.step == last and row in (None, one.row) and one.advantage_T is not None
    ]
    if not parts or not receipts:
        asked = "".join(f" --{name} {value}" for name, value in (("step", step), ("row", row)) if value is not None)
        raise ValueError(
            f"{run.folder} does not say what tokens received{asked and f' ({asked.strip()})'}: a training with "
            "algorithm.token_dump.received=true (in TRL its token_dump) does, and an analysis trains nothing"
        )
    intended, arrived, clipped = (np.concatenate(column) for column in zip(*parts, strict=True))
    words = [receipts[0]["summary"], *(f"{one['name']}: {one['what']}" for one in receipts[0]["findings"][:3])]
    wide, high = 72 * width, 72 * min(width, 3.25)
    text = [part for line in words for part in textwrap.wrap(visible(line), int(wide / 3.8))]
    deep = 10 * len(text) + 6
    figure = Figure(figsize=(width, (high + deep) / 72))
    figure.text(_MARGIN / wide, 6 / (high + deep), "\n".join(text), linespacing=1.3)
    axes = figure.add_axes((40 / wide, (deep + 28) / (high + deep), 1 - 48 / wide, (high - 34) / (high + deep)))
    axes.axline((0, 0), slope=1, color=_EDGE, linewidth=0.8, zorder=0)
    for name, chosen, ink in (("never clipped", ~clipped, _ANSWER), ("clipped at least once", clipped, _CLIPPED)):
        chosen = chosen & np.isfinite(arrived)
        (dots,) = axes.plot(
            intended[chosen], arrived[chosen], "o", color=ink, markersize=2.2, markeredgewidth=0, alpha=0.6
        )
        dots.set(label=f"{name} ({chosen.sum():,})", rasterized=len(arrived) > _POINTS)
    axes.set(xlabel=f"intended advantage of a token, step {last}", ylabel="received")
    axes.legend(loc="upper left")
    return figure
