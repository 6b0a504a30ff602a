"""The page, the CSV file, and the tables for a Markdown page, of a run's results."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from bench.methods import REFERENCES, method_of
from bench.results import FINDS, PLACE, RULE, SPARES, Figures, Result, deciding, figures_of, verdicts, write_json
from bench.statistics import Estimate
from grail_advantage.dump import write_whole
from recipe.marked_text import table, write_marked

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:88rem;margin:1rem auto;padding:0 1rem;color:#1a1a1a;
background:#fff;overflow-wrap:anywhere}p{max-width:48rem}.wide{overflow-x:auto}table{border-collapse:collapse;
font-size:.8rem}th,td{padding:.25rem .3rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap;
overflow-wrap:normal}thead th{white-space:normal;min-width:4rem;vertical-align:bottom}tr>:first-child{text-align:left;
position:sticky;left:0;background:#fff;max-width:9rem;white-space:normal;overflow-wrap:break-word}
tr>:nth-child(2){text-align:left;min-width:8.5rem;white-space:normal}img{width:100%;max-width:40rem}"""
HOW = (
    "How to read it: a token's blame is -A_t, its advantage with the other sign. A method finds errors if the first wrong step "
    "of an incorrect solution is blamed more than its other steps (AUROC above 0.50), and every comparison agrees: with its "
    "own blame shuffled among the tokens that it scored, with place alone in both directions (the earlier the larger, the "
    "later the larger), with each token's blame replaced by the mean of its kind (numbers, words, signs), and with the steps "
    "of correct solutions at the same relative place, weighed as if they were incorrect. ± is half of a 95 % interval by "
    "problem. Tokens of the answer and after it are left out."
)
CONTROLS = {
    "gain": "shuffled",
    "earlier": "earlier first",
    "later": "later first",
    "kinds": "its kinds",
    "above": "equal place",
}
COSTS = ("passes", "forwards", "seconds", "processor seconds")
Tasks = Sequence[tuple[Result, Mapping[str, Figures]]]


class Table(NamedTuple):
    """A table of a page, and its picture (SVG)."""

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
    pairs = [(task, figures_of(task)) for task in result["tasks"]]
    pages = tables(pairs)
    write_whole(paths[2], csv_rows(pairs).to_csv(index=False))
    versions = ", ".join(f"{name} {one}" for name, one in result["versions"].items())
    quick = "This was a quick run: the same tasks with fewer problems. It is too small to decide. " * result["quick"]
    facts = f"{quick}{result['date']}; {versions}."
    write_whole(paths[1], html_page("Does the method find errors?", pages, [facts, HOW, f"Verdicts: {RULE}"]))
    if markdown is not None:
        lines, marker = [facts, ""], "labelled" if result["tasks"][0]["labelled"] else "bench"
        for number, page in enumerate(pages, 1):
            lines += [f"### {page.title}", "", page.note, "", *table(page.head, page.rows, right=2), ""]
            if page.picture:
                picture = markdown.parent / "images" / f"{marker}_{number}.svg"
                write_whole(picture, page.picture)
                lines += [f"![{page.title}](images/{picture.name})", ""]
        write_marked(markdown, marker, "\n".join(lines))
        paths.append(markdown)
    return paths


def csv_rows(tasks: Tasks) -> pd.DataFrame:
    """All figures, and the notes of methods that have none."""
    rows = []
    for task, figures in tasks:
        for method, of in task["methods"].items():
            common = {"task": task["name"], "method": method, "model": task["model"]["name"], "date": task["date"]}
            own = figures.get(method, {})
            rows += [common | {"figure": name, **one._asdict()} for name, one in own.items()] or [
                common | {"note": of["note"]}
            ]
    return pd.DataFrame(rows, columns=["task", "method", "figure", "value", "error", "count", "note", "model", "date"])


def tables(tasks: Tasks) -> list[Table]:
    """Places and agreement of each task, then the cost."""
    pages = []
    for (task, figures), verdict in zip(tasks, verdicts(tasks), strict=True):
        pages.append(_places(task, figures, verdict))
        if not task["labelled"]:
            pages.append(_agreement(task, figures))
    return [*pages, _cost(tasks)]


def _places(task: Result, figures: Mapping[str, Figures], verdict: Mapping[str, str]) -> Table:
    name, comparisons = deciding(task)
    if task["labelled"]:
        beside, note, what = "equal place", _labelled_note(task), "step"
        more = {"hit": "most blamed step is the first wrong one, %", "alike": "AUROC of its tokens among their kind"}
        more["after"] = "steps after it against before"
        if any("first" in one for one in figures.values()):
            more["first"] = "AUROC of the marked tokens among their kind"
    else:
        beside, note, what = "shuffled", _task_note(task), "tokens, among their kind"
        more = {"step": "AUROC, first wrong step", "first_hit": "most blamed token is a first wrong one, %"}
    head = ["method", "verdict", "errors", "scored, %", f"AUROC, first wrong {what}"]
    head += [f"above {CONTROLS[one.rpartition('_')[2]]}" for one in comparisons] + list(more.values())
    rows, points = [], []
    for method, of in task["methods"].items():
        own = figures.get(method, {})
        if name not in own:
            continue
        controls = {one: own.get(f"{one}_control", own.get(f"{one}_shuffled")) for one in (name, *more)}
        errors = sum(one["first"] is not None for part in of["parts"] for one in part["responses"])
        cells = [method, verdict[method], str(errors), f"{100 * own['scored'].value:.0f}", _cell(own[name])]
        cells += [_cell(own.get(one), signed=True) for one in comparisons]
        rows.append(cells + [_cell(own.get(one), controls[one], 100 if "hit" in one else 1) for one in more])
        points.append((method, own[name], controls[name]))
    found = {
        word: [method for method, own in verdict.items() if own == word and method not in REFERENCES]
        for word in (FINDS, SPARES)
    }
    said = " ".join(f"{word.capitalize()}: {', '.join(found[word]) or 'no method'}." for word in found)
    place = figures[PLACE][name].value
    line = max(place, 1 - place), "earlier first" if place >= 0.5 else "later first"
    picture = draw(f"{task['name']}: {head[4]}", points, beside, line)
    note = f"{said} {note} In brackets: {beside}.{_not_measured(task, figures, name)}"
    return Table(f"Places: {task['name']}", note, head, rows, picture)


def _not_measured(task: Result, figures: Mapping[str, Figures], name: str) -> str:
    """A sentence on the methods without a figure, by reason."""
    reasons: dict[str, list[str]] = {}
    for method, of in task["methods"].items():
        if name not in figures.get(method, {}):
            reasons.setdefault(of["note"] or "no errors", []).append(method)
    said = "; ".join(f"{', '.join(methods)} ({reason})" for reason, methods in reasons.items())
    return f" Not measured: {said}." if said else ""


def _own(task: Result, name: str) -> float:
    """A figure of the task's own, over its parts: the mean of shares and cosines, the sum of counts."""
    values = [part[name][0] for part in task["own"]]
    return sum(values) / (len(values) if name in ("own gradient", "halves", "accuracy") else 1)


def _labelled_note(task: Result) -> str:
    counts = "; ".join(f"{count} {name}" for name, count in task["counts"].items())
    used = ", ".join(f"{_own(task, name):.0f} {name}" for name in task["own"][0])
    model = task["model"]
    return (
        f"Read by {model['name']} ({model['dtype']}, {model['device']}, {model['tokens']} tokens a forward); the errors are "
        f"another policy's unless the file was sampled from it. The file ({task['data']}): {counts}. "
        f"{len(task['own'])} batches: {used}. Begun {task['date']}."
    )


def _task_note(task: Result) -> str:
    models = "one model" if len(task["own"]) == 1 else f"{len(task['own'])} models, which are the independent parts,"
    sizes = task["settings"]
    return (
        f"{_own(task, 'known first errors'):.0f} incorrect responses of {models} have a known first error; those of groups "
        f"with both outcomes count. {100 * _own(task, 'accuracy'):.0f} % of the samples are correct. {sizes['problems']} "
        f"problems; {sizes['sft_steps']} steps of fine-tuning. Measured {task['date']}."
    )


def _agreement(task: Result, figures: Mapping[str, Figures]) -> Table:
    rows, points = [], []
    for method in task["methods"]:
        own = figures.get(method, {})
        if "update" not in own:
            continue
        rows.append([method])
        for name in ("credit", "update"):
            rows[-1] += [_cell(own[name], own[f"{name}_shuffled"]), _cell(own[f"{name}_gain"], signed=True)]
        points.append((method, own["update"], own["update_shuffled"]))
    sizes, gradient, halves = task["settings"], _own(task, "own gradient"), _own(task, "halves")
    note = (
        f"Cosine of the update with the gradient of exact accuracy on {sizes['yardstick']} other problems. The exact gradient "
        f"of the update's own {sizes['problems']} problems has {gradient:.2f}, no upper bound; the yardstick's halves have "
        f"{halves:.2f}. Exact credit is under each response's wording. {_own(task, 'mixed groups'):.0f} groups have both "
        f"outcomes and give the updates. Shuffled in brackets.{_not_measured(task, figures, 'update')}"
    )
    head = ["method", "cosine with exact credit", "above shuffled", "cosine of the update", "above shuffled"]
    picture = draw(f"{task['name']}: cosine of the update", points, "shuffled", (gradient, "own gradient"))
    return Table(f"Agreement: {task['name']}", note, head, rows, picture)


def _cost(tasks: Tasks) -> Table:
    task, rows = tasks[0][0], []
    for method in dict.fromkeys(method for _, figures in tasks for method in figures if method not in REFERENCES):
        rows.append([method, method_of(method, not task["labelled"]).cost])
        for _, figures in tasks:
            own = figures.get(method)
            rows[-1] += ["" if own is None else f"{own[name].value:.2f}" for name in COSTS]
    head = ["method", "forward passes, declared"]
    head += [f"{task['name']}: {name}" for task, _ in tasks for name in COSTS]
    note = (
        "Old log-probabilities and entropies are given. Passes: tokens through the first layer, padding counted, over the "
        "batch's; forwards: time on the clock in plain forwards over the batch. On small models fixed costs weigh more."
    )
    return Table("Cost", note, head, rows)


def _cell(own: Estimate | None, control: Estimate | None = None, scale: float = 1, *, signed: bool = False) -> str:
    if own is None or math.isnan(own.value):
        return ""
    digits = 2 if scale == 1 else 0
    text = f"{own.value * scale:{'+' * signed}.{digits}f}"
    if math.isfinite(own.half):
        text += f" ± {own.half * scale:.{digits}f}"
    return text if control is None else f"{text} ({control.value * scale:.{digits}f})"


def draw(title: str, points: Sequence[tuple[str, Estimate, Estimate]], beside: str, line: tuple[float, str]) -> str:
    """A picture (SVG) that can be read on a telephone: of each method a dot with its interval and a hollow dot for its control,
    which is ``beside``; a dashed line with its name."""
    own, controls = ([point[column] for point in points] for column in (1, 2))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}):
        figure = Figure(figsize=(4, 1 + 0.17 * len(points)), layout="constrained")
        axes, places = figure.subplots(), range(len(points))
        halves = np.nan_to_num([one.half for one in own])
        axes.errorbar([one.value for one in own], places, xerr=halves, fmt="o", color="#0b6e4f", markersize=4)
        values = [one.value for one in controls]
        axes.plot(values, places, "o", color="#555", markerfacecolor="none", markersize=6, label=beside)
        axes.axvline(line[0], color="#a33", linestyle="--", linewidth=1, label=line[1])
        axes.set_yticks(places, [name for name, *_ in points])
        axes.invert_yaxis()
        axes.grid(axis="x", color="#ddd")
        figure.suptitle(title, fontsize=8)
        figure.legend(loc="outside lower right", ncols=2, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def html_page(title: str, pages: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """One page that loads nothing from elsewhere."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body><main>',
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    for page in pages:
        name = escape(page.title)
        parts.append(f"<h2>{name}</h2><p>{escape(page.note)}</p>")
        if page.picture:
            parts.append(
                f'<img alt="{name}" src="data:image/svg+xml;base64,{b64encode(page.picture.encode()).decode()}">'
            )
        rows = pd.DataFrame(page.rows, columns=page.head).to_html(index=False, border=0)
        parts.append(f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{rows}</div>')
    return "".join([*parts, "</main></body></html>\n"])
