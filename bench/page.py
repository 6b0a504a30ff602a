"""The page, the CSV file, and the tables for a Markdown page, of a run's rows."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.methods import REFERENCES, signal_of
from bench.places import FIGURES
from bench.statistics import Estimate, pooled
from bench.work import COLUMNS, GSM8K, SETTING, Row, Settings, write_rows
from grail_advantage.dump.whole_file import write_whole
from recipe.marked_text import table, write_marked

TITLES = {GSM8K: "GSM8K, one result changed (SmolLM2-135M)"}
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;
background:#fff}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #ddd;white-space:nowrap}th:first-child,td:first-child{text-align:left}caption{text-align:left}
svg{max-width:100%;height:auto}"""

Figures = Mapping[tuple[str, str], Estimate]
"""By method and figure."""


class Table(NamedTuple):
    """A table of a page, and its picture."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]
    picture: str = ""


def write(rows: Sequence[Row], folder: Path, settings: Settings, markdown: Path | None) -> list[Path]:
    """Write ``index.html`` and ``bench.csv``, and the tables between the markers ``bench`` of a Markdown page, of a run with
    GSM8K only its table between the markers ``gsm8k``; pictures beside the page in ``images``. The paths."""
    pages, paths = tables(rows, settings), [folder / "index.html", folder / "bench.csv"]
    write_rows(paths[1], rows, COLUMNS)
    write_whole(paths[0], html_page("Does the method find anything?", pages))
    if markdown is not None:
        lines, marker = [], GSM8K if any(row["task"] == GSM8K for row in rows) else "bench"
        for number, page in enumerate(pages, 1):
            if marker == GSM8K and TITLES[GSM8K] not in page.title:
                continue
            lines += [f"### {page.title}", "", page.note, "", *table(page.head, page.rows, right=1), ""]
            if page.picture:
                picture = markdown.parent / "images" / f"{markdown.stem}_{number}.svg"
                write_whole(picture, page.picture)
                lines += [f"![{page.title}](images/{picture.name})", ""]
        write_marked(markdown, marker, "\n".join(lines))
        paths.append(markdown)
    return paths


def tables(rows: Sequence[Row], settings: Settings) -> list[Table]:
    """Places and agreement of each task, then the cost."""
    by_task = figures_of(rows)
    notes = {(row["task"], row["method"]): row["note"] for row in rows if row["note"]}
    pages = []
    for task, figures in by_task.items():
        methods = [method for method in dict.fromkeys(row["method"] for row in rows) if method != SETTING]
        models = len({row["seed"] for row in rows if row["task"] == task})
        pages.append(_places(task, methods, figures, notes, models))
        if (SETTING, "ceiling") in figures:
            pages.append(_agreement(task, methods, figures, notes, settings))
    return [*pages, _cost(by_task)]


def figures_of(rows: Iterable[Row]) -> dict[str, dict[tuple[str, str], Estimate]]:
    """Every figure by task, method and name; of several models their mean."""
    estimates: dict[tuple[str, str, str], list[Estimate]] = defaultdict(list)
    for row in rows:
        if row["figure"]:
            one = Estimate(float(row["value"]), float(row["error"]), int(row["count"]))
            estimates[row["task"], row["method"], row["figure"]].append(one)
    by_task: dict[str, dict[tuple[str, str], Estimate]] = defaultdict(dict)
    for (task, method, figure), seeds in estimates.items():
        by_task[task][method, figure] = pooled(seeds) if len(seeds) > 1 else seeds[0]
    return by_task


def _places(
    task: str, methods: Sequence[str], figures: Figures, notes: Mapping[tuple[str, str], str], models: int
) -> Table:
    rows, points = [], []
    for method in methods:
        if (method, "token") not in figures:
            rows.append([method, notes.get((task, method), ""), *[""] * (len(FIGURES) - 1)])
            continue
        rows.append([method])
        for name in FIGURES:
            scale = 100 if name.startswith("hit") else 1
            rows[-1].append(_cell(figures[method, name], figures[method, f"{name}_shuffled"], scale))
        points.append((method, figures[method, "alike"], figures[method, "alike_shuffled"]))
    setting = figures.get((SETTING, "known first errors")) or figures[SETTING, "solutions"]
    count = max((one.count for (_, name), one in figures.items() if name == "token"), default=0)
    parts = "problems" if models == 1 else "models"
    note = (
        f"Of the blame `-A_t`: value ± half of its 95 % interval over {count} {parts} (its shuffled control); the last two "
        f"columns in %. {setting.value:g} incorrect responses{' a model' * (models > 1)} have a known first error; those of "
        "groups with both outcomes count."
    )
    head = ["method", *(title + (", %" if name.startswith("hit") else "") for name, title in FIGURES.items())]
    place = figures["place alone", "alike"].value
    line = (max(place, 1 - place), "place alone" if place >= 0.5 else "the later the larger")
    picture = draw(f"{task}: AUROC of the first wrong token among its kind; hollow: shuffled", points, 0.0, 1.0, line)
    return Table(f"Places: {TITLES.get(task, task)}", note, head, rows, picture)


def _agreement(
    task: str, methods: Sequence[str], figures: Figures, notes: Mapping[tuple[str, str], str], settings: Settings
) -> Table:
    rows, points = [], []
    for method in methods:
        if (method, "update") not in figures:
            rows.append([method, notes.get((task, method), ""), "", "", ""])
            continue
        cells = [_cell(figures[method, name], figures[method, f"{name}_shuffled"]) for name in ("credit", "update")]
        gains = [_cell(figures[method, f"{name}_gain"], signed=True) for name in ("credit", "update")]
        rows.append([method, cells[0], gains[0], cells[1], gains[1]])
        points.append((method, figures[method, "update"], figures[method, "update_shuffled"]))
    ceiling, halves = figures[SETTING, "ceiling"], figures[SETTING, "halves"]
    accuracy, mixed = figures[SETTING, "accuracy"], figures[SETTING, "mixed groups"]
    note = (
        f"Ceiling of an update's cosine {_cell(ceiling)}; halves of the yardstick {halves.value:.2f} ({settings.yardstick} "
        f"problems, none of the update's {settings.problems}). The model is correct on {100 * accuracy.value:.0f} % of its "
        f"samples; {mixed.value:g} of {settings.problems} groups have both outcomes and give the updates. Shuffled in brackets."
    )
    head = ["method", "cosine with exact credit", "above shuffled", "cosine of the update", "above shuffled"]
    title = f"{task}: cosine of the update with the yardstick; hollow: shuffled"
    picture = draw(title, points, -1.0, 1.0, (ceiling.value, "ceiling"))
    return Table(f"Agreement: {task}", note, head, rows, picture)


def _cost(tasks: Mapping[str, Figures]) -> Table:
    head = ["method", "forward passes, declared"]
    methods = dict.fromkeys(method for figures in tasks.values() for method, name in figures if name == "passes")
    rows = {method: [method, signal_of(method).cost] for method in methods if method not in REFERENCES}
    for task, figures in tasks.items():
        head += [f"{task}: tokens through the model, x", "time, forwards", "s"]
        for method, cells in rows.items():
            passes, forwards, seconds = (figures[method, name].value for name in ("passes", "forwards", "seconds"))
            cells += [f"{passes:.2f}", f"{forwards:.1f}", f"{seconds:.2f}"]
    note = (
        "Old log-probabilities and entropies are given. Tokens through the first layer, padding counted, over the batch's; "
        "processor seconds on one thread, also in plain forwards over the batch (a backward counts only there). On small "
        "models, fixed costs weigh more than on real ones."
    )
    return Table("Cost", note, head, list(rows.values()))


def _cell(own: Estimate, control: Estimate | None = None, scale: float = 1, *, signed: bool = False) -> str:
    if math.isnan(own.value):
        return ""
    digits = 2 if scale == 1 else 0
    text = f"{own.value * scale:{'+' * signed}.{digits}f}"
    if math.isfinite(own.half):
        text += f" ± {own.half * scale:.{digits}f}"
    return text if control is None else f"{text} ({control.value * scale:.{digits}f})"


def draw(
    title: str, points: Sequence[tuple[str, Estimate, Estimate]], low: float, high: float, line: tuple[float, str]
) -> str:
    """A picture (SVG): of each method a dot with its interval and a hollow dot for its control; a dashed line with its name."""
    left, width, step = 190, 460, 22
    height = 60 + step * len(points)

    def x(value: float) -> float:
        return left + width * (min(max(value, low), high) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="18" font-weight="bold">{html.escape(title)}</text>',
    ]
    for tick in (low + (high - low) * index / 4 for index in range(5)):
        parts.append(f'<path d="M{x(tick):.1f} 28V{height - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    at, label = x(line[0]), line[1]
    parts.append(f'<path d="M{at:.1f} 28V{height - 20}" stroke="#a33" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{at - 4:.1f}" y="38" text-anchor="end" fill="#a33">{label}</text>')
    for number, (name, own, control) in enumerate(points):
        y = 54 + step * number
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{html.escape(name[:30])}</text>')
        if math.isnan(own.value):
            continue
        if math.isfinite(own.half):
            ends = f"M{x(own.value - own.half):.1f} {y}H{x(own.value + own.half):.1f}"
            parts.append(f'<path d="{ends}" stroke="#0b6e4f" stroke-width="2"/>')
        parts.append(f'<circle cx="{x(control.value):.1f}" cy="{y}" r="4" fill="#fff" stroke="#555"/>')
        parts.append(f'<circle cx="{x(own.value):.1f}" cy="{y}" r="4" fill="#0b6e4f"/>')
    return "".join([*parts, "</svg>\n"])


def html_page(title: str, pages: Sequence[Table]) -> str:
    """One page that loads nothing from elsewhere."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>',
        f"<h1>{html.escape(title)}</h1>",
    ]
    for page in pages:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in page.head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in page.rows)
        parts.append(f"<h2>{html.escape(page.title)}</h2><p>{html.escape(page.note)}</p>{page.picture}")
        parts.append(
            f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(page.title)}"><table><thead><tr>{head}</tr>'
            f"</thead><tbody>{body}</tbody></table></div>"
        )
    return "".join([*parts, "</main></body></html>\n"])
