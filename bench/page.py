"""The page, the CSV file, and the tables for a Markdown page, of a run's results."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.methods import REFERENCES, signal_of
from bench.results import PLACE, RULE, Figures, Result, deciding, figures_of, verdicts, write_json
from bench.statistics import Estimate
from grail_advantage.dump.whole_file import write_whole
from recipe.marked_text import table, write_marked

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:1rem auto;padding:0 1rem;color:#1a1a1a;
background:#fff;overflow-wrap:anywhere}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap;overflow-wrap:normal}
thead th{white-space:normal;min-width:4.5rem;vertical-align:bottom}th:first-child,td:first-child{text-align:left;
position:sticky;left:0;background:#fff;max-width:9rem;white-space:normal}td:nth-child(2){text-align:left}
svg{display:block;width:100%;max-width:40rem;height:auto}"""
HOW = (
    "How to read it: a token's blame is -A_t, its advantage with the other sign. A method finds errors if the first wrong step "
    "of an incorrect solution is blamed more than its other steps (AUROC above 0.50), and every comparison agrees: with its "
    "own blame shuffled among the tokens that it scored, with place alone in both directions (the earlier the larger, the "
    "later the larger), with each token's blame replaced by the mean of its kind (numbers, words, signs), and with the steps "
    "of correct solutions at the same relative place, weighed as if they were incorrect. ± is half of a 95 % interval by "
    "problem. Tokens of the answer and after it are left out."
)
Row = Mapping[str, Any]


class Table(NamedTuple):
    """A table of a page, and its picture."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]
    picture: str = ""


def write(result: Result, folder: Path, markdown: Path | None) -> list[Path]:
    """Write ``results.json``, ``index.html`` and ``bench.csv``, and the tables between the markers ``bench`` of a Markdown page
    (``labelled`` where the results are of a file), with its pictures in ``images``. The paths."""
    paths = [folder / "results.json", folder / "index.html", folder / "bench.csv"]
    write_whole(paths[0], write_json(result))
    figures = [figures_of(task) for task in result["tasks"]]
    pages = tables(result, figures)
    write_rows(paths[2], *csv_rows(result, figures))
    versions = ", ".join(f"{name} {one}" for name, one in result["versions"].items())
    facts = f"{result['date']}; {versions}."
    quick = "This was a quick run: the same tasks with fewer problems. It is too small to decide. " * result["quick"]
    write_whole(paths[1], html_page("Does the method find errors?", pages, [quick + facts, HOW, f"Verdicts: {RULE}"]))
    if markdown is not None:
        lines, marker = [quick + facts, ""], "labelled" if result["tasks"][0]["labelled"] else "bench"
        for number, page in enumerate(pages, 1):
            lines += [f"### {page.title}", "", page.note, "", *table(page.head, page.rows, right=2), ""]
            if page.picture:
                picture = markdown.parent / "images" / f"{marker}_{number}.svg"
                write_whole(picture, page.picture)
                lines += [f"![{page.title}](images/{picture.name})", ""]
        write_marked(markdown, marker, "\n".join(lines))
        paths.append(markdown)
    return paths


def csv_rows(result: Result, figures: Sequence[Mapping[str, Figures]]) -> tuple[list[Row], list[str]]:
    """All figures as rows, and their columns."""
    rows: list[Row] = []
    for task, of_task in zip(result["tasks"], figures, strict=True):
        for method, of in task["methods"].items():
            common = {"task": task["name"], "method": method, "model": task["model"]["name"], "date": task["date"]}
            own = of_task.get(method, {})
            rows += [{**common, "figure": name, **one._asdict(), "note": ""} for name, one in own.items()]
            rows += [] if own else [{**common, "note": of["note"]}]
    return rows, ["task", "method", "figure", "value", "error", "count", "note", "model", "date"]


def tables(result: Result, figures: Sequence[Mapping[str, Figures]]) -> list[Table]:
    """Places and agreement of each task, then the cost."""
    pages = []
    pairs = list(zip(result["tasks"], figures, strict=True))
    for (task, of_task), verdict in zip(pairs, verdicts(pairs), strict=True):
        pages.append(_places(task, of_task, verdict))
        if not task["labelled"]:
            pages.append(_agreement(task, of_task))
    return [*pages, _cost(pairs)]


def _places(task: Result, figures: Mapping[str, Figures], verdict: Mapping[str, tuple[str, float]]) -> Table:
    name, comparisons = deciding(task)
    what = "step" if name == "step" else "tokens, among their kind"
    titles = {
        "gain": "shuffled",
        "earlier": "earlier first",
        "later": "later first",
        "kinds": "its kinds",
        "above": "equal place",
    }
    head = ["method", "verdict", "errors", "scored, %", f"AUROC, first wrong {what}"]
    head += [f"above {titles[one.rpartition('_')[2]]}" for one in comparisons]
    more = {"hit": "most blamed step is the first wrong one, %"}
    more |= {"alike": "AUROC of its tokens among their kind", "after": "steps after it against before"} if name == "step" else {
        "step": "AUROC, first wrong step", "first_hit": "most blamed token is a first wrong one, %"
    }  # fmt: skip
    if task["labelled"] and any("first" in one for one in figures.values()):
        more["first"] = "AUROC of the marked tokens among their kind"
    rows, points = [], []
    for method, of in task["methods"].items():
        own = figures.get(method, {})
        if name not in own:
            rows.append([method, of["note"] or "no errors", *[""] * (len(head) - 2 + len(more))])
            continue
        cells = [_cell(own.get(one), signed=True) for one in comparisons]
        errors = sum(one["first"] is not None for part in of["parts"] for one in part["responses"])
        rows.append(
            [method, verdict[method][0], str(errors), f"{100 * own['scored'].value:.0f}", _cell(own[name]), *cells]
        )
        for one in more:
            other = own.get(f"{one}_control", own.get(f"{one}_shuffled"))
            rows[-1].append(_cell(own.get(one), other, 100 if "hit" in one else 1))
        points.append((method, own[name], own.get(f"{name}_control", own[f"{name}_shuffled"])))
    beside = "the same at equal place of correct solutions" if task["labelled"] else "shuffled"
    own_note = _labelled_note(task) if task["labelled"] else _task_note(task)
    note = f"{own_note} In brackets: {beside}."
    place = figures[PLACE][name].value
    line = max(place, 1 - place), "earlier first" if place >= 0.5 else "later first"
    picture = draw(
        f"{task['name']}: AUROC; hollow: {'equal place' if task['labelled'] else 'shuffled'}", points, 0.2, 0.8, line
    )
    return Table(f"Places: {task['name']}", note, [*head, *more.values()], rows, picture)


def _own(task: Result, name: str) -> float:
    """A figure of the task's own, over its parts: the sum of counts, the mean of others."""
    values = [part[name][0] for part in task["own"]]
    return sum(values) / (1 if task["labelled"] else len(values))


def _labelled_note(task: Result) -> str:
    counts = "; ".join(f"{count} {name}" for name, count in task["counts"].items())
    used = ", ".join(f"{_own(task, name):.0f} {name}" for name in task["own"][0])
    model = task["model"]
    return (
        f"Read by {model['name']} ({model['dtype']}, {model['device']}); the errors are another policy's unless the file was "
        f"sampled from it. The file ({task['data']}): {counts}. {len(task['own'])} batches: {used}. Begun {task['date']}."
    )


def _task_note(task: Result) -> str:
    models = "one model" if len(task["own"]) == 1 else f"{len(task['own'])} models, which are the independent parts,"
    return (
        f"{_own(task, 'known first errors'):.0f} incorrect responses of {models} have a known first error; those of groups "
        f"with both outcomes count. {100 * _own(task, 'accuracy'):.0f} % of the samples are correct. Measured {task['date']}."
    )


def _agreement(task: Result, figures: Mapping[str, Figures]) -> Table:
    rows, points = [], []
    for method, of in task["methods"].items():
        own = figures.get(method, {})
        if "update" not in own:
            rows.append([method, of["note"] or "", "", "", ""])
            continue
        cells = [_cell(own[name], own[f"{name}_shuffled"]) for name in ("credit", "update")]
        gains = [_cell(own[f"{name}_gain"], signed=True) for name in ("credit", "update")]
        rows.append([method, cells[0], gains[0], cells[1], gains[1]])
        points.append((method, own["update"], own["update_shuffled"]))
    sizes, gradient, halves = task["settings"], _own(task, "own gradient"), _own(task, "halves")
    note = (
        f"Cosine of the update with the gradient of exact accuracy on {sizes['yardstick']} other problems. The exact gradient "
        f"of the update's own {sizes['problems']} problems has {gradient:.2f}, no upper bound; the yardstick's halves have "
        f"{halves:.2f}. Exact credit is under each response's wording. {_own(task, 'mixed groups'):.0f} groups have both "
        "outcomes and give the updates. Shuffled in brackets."
    )
    head = ["method", "cosine with exact credit", "above shuffled", "cosine of the update", "above shuffled"]
    title = f"{task['name']}: cosine of the update; hollow: shuffled"
    picture = draw(title, points, -1.0, 1.0, (gradient, "own gradient"))
    return Table(f"Agreement: {task['name']}", note, head, rows, picture)


def _cost(tasks: Sequence[tuple[Result, Mapping[str, Figures]]]) -> Table:
    head, rows = ["method", "forward passes, declared"], {}
    for task, figures in tasks:
        head += [f"{task['name']}: tokens through the model, x", "forwards", "s", "processor s"]
        for method, own in figures.items():
            if method not in REFERENCES:
                cells = rows.setdefault(method, [method, signal_of(method, not task["labelled"]).cost])
                values = (own[name].value for name in ("passes", "forwards", "seconds", "processor seconds"))
                cells += [
                    form.format(value)
                    for form, value in zip(("{:.2f}", "{:.1f}", "{:.2f}", "{:.2f}"), values, strict=True)
                ]
    note = (
        "Old log-probabilities and entropies are given. Tokens through the first layer, padding counted, over the batch's; "
        "time on the clock in plain forwards over the batch, and in seconds; processor seconds. On small models fixed costs "
        "weigh more."
    )
    return Table("Cost", note, head, list(rows.values()))


def _cell(own: Estimate | None, control: Estimate | None = None, scale: float = 1, *, signed: bool = False) -> str:
    if own is None or math.isnan(own.value):
        return ""
    digits = 2 if scale == 1 else 0
    text = f"{own.value * scale:{'+' * signed}.{digits}f}"
    if math.isfinite(own.half):
        text += f" ± {own.half * scale:.{digits}f}"
    return text if control is None else f"{text} ({control.value * scale:.{digits}f})"


def draw(
    title: str, points: Sequence[tuple[str, Estimate, Estimate]], low: float, high: float, line: tuple[float, str]
) -> str:
    """A picture (SVG): of each method a dot with its interval and a hollow dot for its control; a dashed line with its name. It
    is 400 wide, so that it can be read on a telephone."""
    left, width, step = 150, 225, 20
    height = 62 + step * len(points)

    def x(value: float) -> float:
        return left + width * (min(max(value, low), high) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="6" y="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for tick in (low + (high - low) * index / 4 for index in range(5)):
        parts.append(f'<path d="M{x(tick):.1f} 36V{height - 18}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 5}" text-anchor="middle">{tick:.3g}</text>')
    parts.append(f'<path d="M{x(line[0]):.1f} 36V{height - 18}" stroke="#a33" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{x(line[0]):.1f}" y="30" text-anchor="middle" fill="#a33">{line[1]}</text>')
    for number, (name, own, control) in enumerate(points):
        y = 50 + step * number
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{html.escape(name[:25])}</text>')
        if math.isnan(own.value):
            continue
        if math.isfinite(own.half):
            ends = f"M{x(own.value - own.half):.1f} {y}H{x(own.value + own.half):.1f}"
            parts.append(f'<path d="{ends}" stroke="#0b6e4f" stroke-width="2"/>')
        parts.append(f'<circle cx="{x(control.value):.1f}" cy="{y}" r="4" fill="#fff" stroke="#555"/>')
        parts.append(f'<circle cx="{x(own.value):.1f}" cy="{y}" r="3.5" fill="#0b6e4f"/>')
    return "".join([*parts, "</svg>\n"])


def html_page(title: str, pages: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """One page that loads nothing from elsewhere."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body><main>',
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
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


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """A CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
