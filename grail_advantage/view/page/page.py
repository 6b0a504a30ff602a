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
from grail_advantage.view.page import by_position, colours, data, index, pack, words
from grail_advantage.view.page.collection import Collection, read_runs
from grail_advantage.view.whole_file import write_whole

REPORT = "report.html"
ROLLOUTS = 2000
MEGABYTES = 35.0
_SCRIPTS = [
    f"{name}.js"
    for name in (
        *("report", "words", "unpack", "state", "colours", "curves", "position", "list", "reader", "tokens", "choices"),
        "start",
    )
]
"""The page's script in the order of its parts; each takes from those before it."""
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
        folder: a run's (``metrics.jsonl``, ``tokens/``), or a token dump's.
        output: the file; by default ``report.html`` in ``folder``.
        against: a second run, drawn beside the first.
        rollouts: how many rollouts the page holds at most; whole problems, evenly over the steps.
        megabytes: how large the file may be, in 10^6 bytes. Values are rounded as far as that needs, then fewer rollouts are
            taken; the page says which.

    Returns:
        The file.

    Raises:
        ValueError: a folder holds nothing that can be shown.
    """
    if rollouts < 1:
        raise ValueError(f"--rollouts must be at least 1, not {rollouts}")
    if megabytes < 1:
        raise ValueError(f"--megabytes must be at least 1, not {megabytes:g}: the page itself takes 0.2")
    runs = [data.open_run(folder), *([data.open_run(against)] if against is not None else [])]
    path = Path(output) if output is not None else Path(folder) / REPORT
    page = render(runs, rollouts=rollouts, megabytes=megabytes)
    write_whole(path, page)
    return path


def render(runs: Sequence[data.Run], *, rollouts: int = ROLLOUTS, megabytes: float = MEGABYTES) -> str:
    """The page of one run or two; see :func:`write_report`."""
    names = words.names([run.folder for run in runs])
    files = [(number, file) for number, run in enumerate(runs) if run.dump is not None for file in run.dump.files]
    collection = Collection()
    tables = read_runs(runs, files, collection, rollouts)
    headers = [file.header for _, file in (files[:1] + [entry for entry in files if entry[0] == 1][:1])]
    for header in headers:
        collection.vocabulary.special.update(header.special_tokens if header is not None else {})
    methods = index.methods_of(headers, collection)
    known, more = index.curves(runs)
    content: dict[str, Any] = {
        "methods": methods,
        "runs": [{"name": name} for name in names],
        "curves": known,
        "more": more,
        "bins": by_position.BINS,
        "position": index.positions(runs, tables, methods),
        "colours": {"half": _HALF, "steps": _STEPS},
        "nothing": words.nothing(runs),
    }
    title = " against ".join(names)
    asked = len(collection.kept)
    while True:
        content |= {
            "rows": index.rows(collection.kept),
            "groups": collection.groups,
            "problems": collection.problems,
            "limits": index.limits(collection.kept),
            "overlays": index.overlays(collection.kept),
            "subtitle": words.subtitle(runs, headers, collection),
            "notes": words.notes(runs, collection, asked),
        }
        order, rank = pack.by_frequency((kept.columns for kept in collection.kept), len(collection.vocabulary.numbers))
        vocabulary = pack.encode_json(collection.vocabulary.table(order))
        # The last line of the page depends on the room that is left.
        without = _page(title, index.plain(content | {"foot": []}), vocabulary, [""] * asked)
        room = int(megabytes * 1e6) - len(without) - 1000
        blocks, bits, apart = pack.pack_all([kept.columns for kept in collection.kept], rank, room)
        size = sum(map(len, blocks))
        if size <= room or len(collection.kept) <= 1 or not collection.thin(0.95 * max(room, 1) / size):
            break
    content["foot"] = words.foot(headers, bits, apart, bool(blocks))
    return _page(title, index.plain(content), vocabulary, blocks)


def _page(title: str, content: dict[str, Any], vocabulary: str, blocks: Sequence[str]) -> str:
    assets = resources.files("grail_advantage.view.page") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    uplot = assets / "uplot"
    style = _style(read("report.css")) + (uplot / "uPlot.min.css").read_text(encoding="utf-8")
    scripts = [(uplot / "uPlot.iife.min.js").read_text(encoding="utf-8"), "".join(map(read, _SCRIPTS))]
    for text in (style, *scripts):
        if "</" in text:
            raise AssertionError("a script or style may not hold what could end it")
    policy = "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(map(_hash, scripts)),
            f"style-src {_hash(style)}",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "POLICY": policy,
        "GENERATOR": f"grail_advantage {__version__}",
        "TITLE": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "STYLE": style,
        "INDEX": pack.encode_json(content),
        "VOCABULARY": vocabulary,
        "UPLOT": scripts[0],
        "SCRIPT": scripts[1],
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
            f".{scale}{place}{{background-color:{colour}}}"
            for scale, table in scales.items()
            for place, colour in enumerate(table)
        )
        text = text.replace(f"%{name}_GROUND%", scales["s"][0])
    return f"{text}{rules['LIGHT']}@media (prefers-color-scheme: dark){{{rules['DARK']}}}.t.none{{background:none}}"
