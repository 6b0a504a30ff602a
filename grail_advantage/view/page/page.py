"""A run as one HTML file that needs no network: curves, where the weight falls, and every kept rollout token by token.

The file holds its data as blocks of text (pack.py) that its script (assets/*.js) unpacks when they are looked at, so that
thousands of long rollouts open at once. Texts of a model reach the page as ``textContent`` only, and a Content-Security-Policy
lets nothing run but the two scripts that were put in here, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from grail_advantage import __version__
from grail_advantage.answers.missing import is_low
from grail_advantage.dump import TOKENS, DumpHeader, write_whole
from grail_advantage.view.page import by_position, colours, data, index, pack, turns

REPORT = "report.html"
ROLLOUTS = 2000
MEGABYTES = 35.0
_SCRIPTS = ("words", "unpack", "state", "colours", "curves", "position", "list", "reader", "tokens", "choices")
"""The parts of the page's script, which share one scope, in the order in which they run."""
_TURNS = "turns"
"""A further part, for conversations: functions alone."""
_HALF, _STEPS = 32, 65
"""Colours on each side of a diverging scale, and of a sequential one."""


def write_report(
    folder: Path | str,
    output: Path | str | None = None,
    *,
    against: Path | str | None = None,
    rollouts: int = ROLLOUTS,
    megabytes: float = MEGABYTES,
) -> Path:
    """Write the report of a run.

    Args:
        folder: a run, as :func:`grail_advantage.view.places.find` takes it.
        output: the file; by default ``report.html`` in the run's folder.
        against: a second run, drawn beside the first.
        rollouts: how many rollouts the page holds at most; whole problems, evenly over the steps.
        megabytes: how large the file may be, in 10^6 bytes; where that needs it, fewer rollouts are taken.

    Returns:
        The file.

    Raises:
        ValueError: a folder holds nothing that can be shown.
    """
    runs = [data.open_run(run) for run in (folder, against) if run is not None]
    return write_page(runs, output, rollouts=rollouts, megabytes=megabytes)


def write_page(
    runs: Sequence[data.Run],
    output: Path | str | None = None,
    *,
    rollouts: int = ROLLOUTS,
    megabytes: float = MEGABYTES,
) -> Path:
    """Write the report of one run or two; see :func:`write_report`."""
    if rollouts < 1:
        raise ValueError(f"--rollouts must be at least 1, not {rollouts}")
    if not megabytes >= 1:
        raise ValueError(f"--megabytes must be at least 1, not {megabytes:g}: the page itself takes 0.2")
    name = REPORT if len(runs) == 1 else f"report_against_{runs[1].folder.resolve().name}.html"
    path = Path(output) if output is not None else runs[0].folder / name
    write_whole(path, render(runs, rollouts=rollouts, megabytes=megabytes))
    return path


def render(runs: Sequence[data.Run], *, rollouts: int = ROLLOUTS, megabytes: float = MEGABYTES) -> str:
    """The page of one run or two; see :func:`write_report`."""
    names = _names([run.folder for run in runs])
    header = next((run.header for run in runs if run.header is not None), None)
    selection = index.Selection()
    tables = selection.read(runs, rollouts)
    asked = sum(len(group.places) for group in selection.groups)
    selection.draw(megabytes * 1e6)
    methods = selection.methods(header)
    given = [selection.given_by(number, methods) for number in range(len(runs))]
    positions = index.positions(tables, methods, given)
    curves, more = index.curves(runs, selection.verdicts.field)
    content: dict[str, Any] = {
        "methods": methods,
        "runs": [{"name": name, "given": of_run} for name, of_run in zip(names, given, strict=True)],
        "overlays": selection.overlays(len(runs), methods),
        "verdict": selection.verdicts.field,
        "outcomes": data.outcome_words(selection.verdicts.field),
        "curves": curves,
        "more": more,
        "bins": by_position.BINS,
        "position": positions,
        "explained": selection.explained(positions),
        "colours": {"half": _HALF, "steps": _STEPS},
        "nothing": _nothing(runs),
        "receipt": index.receipt(runs),
    }
    scripts = [*_SCRIPTS]
    if selection.verdicts.conversations:
        scripts.append(_TURNS)
        content["by_turn"] = turns.curves([selection.by_turn[number] for number in range(len(runs))])
    while True:
        content |= selection.index()
        content["subtitle"] = _subtitle(runs, header, selection)
        content["notes"] = _notes(runs, selection, asked)
        content["foot"] = _foot(header, bool(selection.rollouts))
        blocks = [rollout.block for rollout in selection.rollouts]
        page = _page(" against ".join(names), index.plain(content), scripts, blocks)
        over = len(page.encode()) - megabytes * 1e6
        share = 1 - over / max(1, sum(map(len, blocks)))
        if over <= 0 or len(blocks) <= 1 or not selection.thin(max(0.01, 0.98 * share)):
            return page


def _page(title: str, content: dict[str, Any], scripts: Sequence[str], blocks: Sequence[str]) -> str:
    assets = resources.files("grail_advantage.view.page") / "assets"

    def read(name: str) -> str:
        text = (assets / name).read_text(encoding="utf-8")
        return re.sub(r"^ +(?://.*\n)?|^//.*\n", "", text, flags=re.MULTILINE)  # without indentation and comments

    style = _style(read("report.css")) + read("uplot/uPlot.min.css")
    texts = [read("uplot/uPlot.iife.min.js"), "\n".join(read(f"{name}.js") for name in scripts)]
    for text in (style, *texts):
        if "</" in text:
            raise AssertionError("a script or style may not hold what could end it")
    parts = {
        "POLICY": f"default-src 'none'; script-src {' '.join(map(_hash, texts))}; style-src {_hash(style)}; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'",
        "GENERATOR": f"grail_advantage {__version__}",
        "TITLE": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "STYLE": style,
        "INDEX": pack.encode_json(content),
        "UPLOT": texts[0],
        "SCRIPT": texts[1],
        "BLOCKS": "\n".join(f'<script type="text/plain" id="r{i}">{block}</script>' for i, block in enumerate(blocks)),
    }
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], read("report.html"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style(text: str) -> str:
    """The style sheet with the colours of both themes."""
    themes = {"LIGHT": colours.LIGHT, "DARK": colours.DARK}
    rules = {}
    for name, theme in themes.items():
        scales = {"d": colours.diverging(2 * _HALF + 1, theme), "s": colours.sequential(_STEPS, theme)}
        rules[name] = "".join(
            f".{scale}{place}{{background:{colour}}}"
            for scale, table in scales.items()
            for place, colour in enumerate(table)
        )
        text = text.replace(f"%{name}_GROUND%", scales["s"][0])
    return f"{text}{rules['LIGHT']}@media (prefers-color-scheme: dark){{{rules['DARK']}}}"


# ---------------------------------------------------------------------------------------------------------------- sentences


def _names(folders: Sequence[Path]) -> list[str]:
    """Ends of the paths, as long as the runs need to differ in them."""
    parts = []
    for folder in folders:
        whole = folder.resolve().parts
        parts.append(whole[:-1] if whole[-1] == TOKENS and len(whole) > 2 else whole)
    if len(parts) == 1:
        # A run's folder is often named by its method alone.
        return ["/".join(parts[0][-3:]).replace("//", "/")]
    ends = [["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1)]
    numbered = [f"{name} ({number})" for number, name in enumerate(ends[-1], start=1)]
    return next((names for names in ends if len(set(names)) == len(names)), numbered)


def _subtitle(runs: Sequence[data.Run], header: DumpHeader | None, selection: index.Selection) -> str:
    parts = [header.method, Path(header.model).name] if header is not None else []
    steps = sorted({step for run in runs for step in run.metrics} | {group.facts["step"] for group in selection.groups})
    if len(steps) > 1:
        parts.append(f"steps {steps[0]} to {steps[-1]}")
    if selection.rollouts:
        tokens = sum(rollout.facts["length"] for rollout in selection.rollouts)
        parts.append(f"{len(selection.rollouts):,} rollouts, {tokens:,} tokens")
    return " · ".join(part for part in parts if part)


def _foot(header: DumpHeader | None, rollouts: bool) -> list[str]:
    lines = []
    if header is not None and header.method:
        options = ", ".join(f"{name} {value}" for name, value in header.options.items() if value is not None)
        temperature = "" if header.temperature is None else f" Temperature {header.temperature:g}."
        lines.append(f"Method {header.method}{': ' + options if options else ''}.{temperature}")
    if rollouts:
        lines.append("Values a token are rounded to float16, by at most 0.1 %; the token dump has them exactly.")
    lines.append(
        f"Written by grail_advantage {__version__}. This file needs no network. Plots: uPlot 1.6.32, MIT licence."
    )
    return lines


def _nothing(runs: Sequence[data.Run]) -> str:
    if runs[0].dump is None:
        return f"There are no rollouts to read: {runs[0].lacks[0]}."
    return "The token dump holds no rollout that can be read; the notes at the top say what is wrong with it."


def _notes(runs: Sequence[data.Run], selection: index.Selection, asked: int) -> list[str]:
    """Responses without what the method needs, rollouts that were left out, and what could not be read."""
    lines = []
    for number, run in enumerate(runs):
        header = run.header
        answered, responses = selection.answered[number], selection.responses[number]
        if header is not None and header.answer is not None and is_low(answered, responses):
            lines.append(
                f"{answered:,} of the {responses:,} responses have an answer in the format {header.answer}. Every token of "
                f"the others has weight 1 under {header.method}, so that they train as with uniform. Is "
                "algorithm.token_weights.answer right?"
            )
        if failed := selection.failed_calls[number]:
            lines.append(
                f"{failed:,} tool calls in the {responses:,} responses failed: the tool raised or is not there, or its "
                "arguments are no JSON. verl gives such a call the reward 0, which is no judgement; their turns are marked."
            )
    count = len(selection.rollouts)
    seen = selection.responses.total()
    if seen > count:
        option = "--rollouts" if asked == count else "--megabytes"
        lines.append(
            f"The page holds {count:,} of the {seen:,} rollouts in the dump, whole problems evenly over the steps "
            f"({option} for more). Means by place and step are over all of them."
        )
    lines += [lack for run in runs if run.dump is not None for lack in run.lacks]
    return lines + [str(problem) for run in runs for problem in dict.fromkeys(run.problems)]
