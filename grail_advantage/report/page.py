"""A run as one HTML file that needs no network: curves, where the weight falls, and every kept rollout token by token.

The file holds its data as blocks of text (pack.py) that its script (assets/report.js) unpacks when they are looked at, so that
thousands of long rollouts open at once. Texts of a model reach the page as ``textContent`` only, and a Content-Security-Policy
lets nothing run but the two scripts that were put in here, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage import __version__
from grail_advantage.report import colours, data, pack
from grail_advantage.token_dump import DumpFile, DumpHeader, DumpRow

REPORT = "report.html"
ROLLOUTS = 2000
MEGABYTES = 30.0
_HALF, _STEPS = 32, 65
"""Colours on each side of a diverging scale, and of a sequential one."""
_WEIGHT_LIMITS = (1.25, 2.0, colours.WEIGHT_LIMIT)
_OVERLAYS = ("weight", "score", "advantage", "surprisal", "entropy")
_GROUP = 8
"""Responses a prompt in common set-ups, for the choice of steps."""


@dataclass(eq=False)
class _Kept:
    """A rollout of the page."""

    run: int
    row: DumpRow
    group: int
    columns: pack.Columns
    spread: float
    neutrals: dict[str, str | None]
    """By method, where several weighed the row."""


@dataclass
class _Collection:
    """Rollouts of all runs, while they are read."""

    vocabulary: pack.Vocabulary = field(default_factory=pack.Vocabulary)
    kept: list[_Kept] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    """Problems by what tells them apart."""
    seen: int = 0

    def add(self, run: int, rows: Sequence[DumpRow], quota: int) -> None:
        """The rows of one file: whole groups until there are ``quota`` rows, at least one group."""
        self.seen += len(rows)
        groups: dict[int, list[DumpRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        taken = 0
        for place, members in enumerate(groups.values()):
            if taken and taken + len(members) > quota:
                break
            taken += len(members)
            first = members[0]
            problem = first.id or first.prompt or first.prompt_ids.tobytes()
            if problem not in self.numbers:
                self.numbers[problem] = len(self.problems)
                self.problems.append({"prompt": first.prompt, "gold": first.gold, "id": first.id})
            number = len(self.groups)
            self.groups.append(
                {
                    "run": run,
                    "step": first.step,
                    "problem": self.numbers[problem],
                    "place": place,
                    "total": len(members),
                }
            )
            for row in members:
                columns = pack.columns_of(row, self.vocabulary)
                # Of several methods, the first is what the page shows first.
                weight_T = next((found.weight_T for found in row.methods.values()), row.weight_T)
                trained = weight_T[row.mask_T]
                trained = trained[np.isfinite(trained)].astype(np.float64)
                spread = float(trained.std()) if len(trained) else math.nan
                # The numbers are in the columns; the row keeps what the index needs.
                neutrals = {name: found.neutral for name, found in row.methods.items()}
                self.kept.append(_Kept(run, _light(row), number, columns, spread, neutrals))


def _light(row: DumpRow) -> DumpRow:
    """The row without what is in the columns."""
    none: np.ndarray = np.zeros(0, dtype=np.float32)
    return replace(
        row,
        response="",
        prompt="",
        prompt_ids=none,
        token_ids_T=np.empty(len(row), dtype=np.uint8),
        tokens=(),
        mask_T=none,
        score_T=None,
        weight_T=none,
        base_advantage_T=None if row.base_advantage_T is None else row.base_advantage_T[:1].copy(),
        advantage_T=None,
        old_log_prob_T=None,
        entropy_T=None,
        methods={},
    )


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:  # never through a link that somebody put into the run's folder
        file.write(page)
    os.replace(temporary, path)
    return path


def render(runs: Sequence[data.Run], *, rollouts: int = ROLLOUTS, megabytes: float = MEGABYTES) -> str:
    """The page of one run or two; see :func:`write_report`."""
    names = _names([run.folder for run in runs])
    files = [(number, file) for number, run in enumerate(runs) if run.dump is not None for file in run.dump.files]
    collection = _Collection()
    tables = _read(runs, files, collection, rollouts)
    headers = [file.header for _, file in (files[:1] + [entry for entry in files if entry[0] == 1][:1])]
    for header in headers:
        collection.vocabulary.special.update(header.special_tokens if header is not None else {})
    methods = _methods(headers, collection)
    known, more = _curves(runs)
    index: dict[str, Any] = {
        "methods": methods,
        "runs": [{"name": name} for name in names],
        "curves": known,
        "more": more,
        "bins": data.BINS,
        "position": _positions(runs, tables, methods),
        "colours": {"half": _HALF, "steps": _STEPS},
        "nothing": _nothing(runs),
    }
    title = " against ".join(names)
    asked = len(collection.kept)
    while True:
        index |= {
            "rows": _rows(collection.kept),
            "groups": collection.groups,
            "problems": collection.problems,
            "limits": _limits(collection.kept),
            "overlays": _overlays(collection.kept),
            "subtitle": _subtitle(runs, headers, collection),
            "notes": _notes(runs, collection, asked),
        }
        order, rank = pack.by_frequency((kept.columns for kept in collection.kept), len(collection.vocabulary.numbers))
        vocabulary = pack.encode_json(collection.vocabulary.table(order))
        # What the last line of the page says depends on the room that is left.
        room = int(megabytes * 1e6) - len(_page(title, _plain(index | {"foot": []}), vocabulary, [""] * asked)) - 1000
        blocks, bits, rounding = pack.pack_all([kept.columns for kept in collection.kept], rank, room)
        size = sum(map(len, blocks))
        if size <= room or len(collection.kept) <= 1 or not _thin(collection, 0.95 * max(room, 1) / size):
            break
    index["foot"] = _foot(headers, bits, rounding, bool(blocks))
    return _page(title, _plain(index), vocabulary, blocks)


def _overlays(kept: Sequence[_Kept]) -> list[str]:
    """What tokens can be coloured by."""
    known = {name.split(":")[0] for one in kept for name in one.columns.values}
    return [name for name in _OVERLAYS if name in known] or ["weight"]


def _notes(runs: Sequence[data.Run], collection: _Collection, asked: int) -> list[str]:
    """What a reader has to know: what is left out, and what could not be read."""
    notes = []
    count = len(collection.kept)
    if collection.seen > count:
        why = "--rollouts" if asked == count else "--megabytes"
        notes.append(
            f"The page holds {count:,} of the {collection.seen:,} rollouts in the dump, whole problems evenly over the steps "
            f"({why} for more). Means by place and step are over all of them."
        )
    return notes + [str(problem) for run in runs for problem in dict.fromkeys(run.problems)]


# ------------------------------------------------------------------------------------------------------------------- reading


def _read(
    runs: Sequence[data.Run], files: Sequence[tuple[int, DumpFile]], collection: _Collection, rollouts: int
) -> list[data.RowTable | None]:
    """Read every file once: figures of all rows, and the rollouts that the page keeps."""
    count = max(1, min(len(files), rollouts // _GROUP))
    chosen = {round(place) for place in np.linspace(0, max(0, len(files) - 1), count)} if files else set()
    quota = max(1, rollouts // max(1, len(chosen)))
    numbered = list(enumerate(files))

    def rows(run: int) -> Iterator[DumpRow]:
        for number, (of_run, file) in numbered:
            if of_run != run:
                continue
            found = list(file.rows())
            if number in chosen:
                collection.add(run, found, quota)
            else:
                collection.seen += len(found)
            yield from found

    return [data.row_table(rows(number)) if run.dump is not None else None for number, run in enumerate(runs)]


def _thin(collection: _Collection, share: float) -> bool:
    """Keep a share of the groups of every step; whether any went."""
    by_step: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(collection.groups):
        by_step.setdefault((group["run"], group["step"]), []).append(number)
    keep = {number for groups in by_step.values() for number in groups[: max(1, math.floor(len(groups) * share))]}
    if len(keep) == len(collection.groups):
        # One group a step already: fewer steps.
        keep = set(sorted(keep)[:: max(2, math.ceil(1 / share))])
    if len(keep) == len(collection.groups):
        return False
    places = {number: place for place, number in enumerate(sorted(keep))}
    collection.kept = [kept for kept in collection.kept if kept.group in keep]
    for kept in collection.kept:
        kept.group = places[kept.group]
    collection.groups = [collection.groups[number] for number in sorted(keep)]
    return True


def _methods(headers: Sequence[DumpHeader | None], collection: _Collection) -> list[str]:
    """Names of the methods, in the dump's order."""
    compared = list(dict.fromkeys(name for kept in collection.kept for name in kept.neutrals))
    named = [header.method for header in headers if header is not None and header.method]
    return compared or named[:1] or ["weights"]


# --------------------------------------------------------------------------------------------------------------- the index


def _rows(kept: Sequence[_Kept]) -> dict[str, list[Any]]:
    def advantage(row: DumpRow) -> float | None:
        return None if row.base_advantage_T is None or not len(row.base_advantage_T) else float(row.base_advantage_T[0])

    def wrong_step(row: DumpRow) -> list[int] | None:
        found = row.labels.get("wrong_step")
        valid = isinstance(found, list) and len(found) == 2 and all(type(edge) is int for edge in found)
        return found if valid else None

    return {
        "run": [one.run for one in kept],
        "step": [one.row.step for one in kept],
        "update": [one.row.update for one in kept],
        "row": [one.row.row for one in kept],
        "group": [one.group for one in kept],
        "outcome": [one.row.outcome if one.row.outcome in data.OUTCOMES else None for one in kept],
        "reward": [one.row.reward for one in kept],
        "answer": [one.row.answer for one in kept],
        "truncated": [one.row.truncated for one in kept],
        "neutral": [one.row.neutral for one in kept],
        "neutrals": [one.neutrals or None for one in kept],
        "span": [
            [span.start, span.content_start, span.content_end, span.end] if (span := one.row.span) else None
            for one in kept
        ],
        "wrong_step": [wrong_step(one.row) for one in kept],
        "length": [len(one.row) for one in kept],
        "spread": [one.spread for one in kept],
        "advantage": [advantage(one.row) for one in kept],
    }


def _curves(runs: Sequence[data.Run]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The plots that every run has, and one for each other metric."""
    known: dict[str, dict[str, Any]] = {}
    more: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for curve in data.curves(run.metrics):
            entry = known.setdefault(curve.name, {"title": curve.title, "unit": curve.unit, "lines": []})
            for line in curve.lines:
                entry["lines"].append(_line(line.label, number, line.steps, line.values))
        for name in sorted({name for values in run.metrics.values() for name in values}):
            points = [(step, values[name]) for step, values in run.metrics.items() if name in values]
            entry = more.setdefault(name, {"title": name, "unit": "", "lines": []})
            entry["lines"].append(_line(name, number, *zip(*points, strict=True)))
    return list(known.values()), list(more.values())


def _line(label: str, run: int, steps: Iterable[int], values: Iterable[float]) -> dict[str, Any]:
    return {"label": label, "run": run, "steps": list(steps), "values": list(values)}


def _positions(
    runs: Sequence[data.Run], tables: Sequence[data.RowTable | None], methods: Sequence[str]
) -> dict[str, Any]:
    """Mean weights by place, for each method."""
    found = {}
    for method in methods:
        # The tables are of the plain columns; of several methods, each needs another reading.
        of_method = tables
        if len(methods) > 1:
            of_method = [None if run.dump is None else data.row_table(run.dump.rows(), method=method) for run in runs]
        if (position := _position(of_method)) is not None:
            found[method] = position
    return found


def _position(tables: Sequence[data.RowTable | None]) -> dict[str, Any] | None:
    lines = []
    for run, table in enumerate(tables):
        if table is None:
            continue
        scored = table.where(table.scored)
        outcomes = [outcome for outcome in data.OUTCOMES if (scored.outcomes == outcome).any()] or [""]
        for outcome in outcomes:
            chosen = scored.where(scored.outcomes == outcome)
            if not len(chosen) or not np.isfinite(chosen.profiles).any():
                continue
            means = data.clustered_means(chosen.profiles, chosen.groups)
            line = {"outcome": outcome, "run": run, "rows": means.rows}
            # Without a second problem there is no interval.
            low, high = (np.where(np.isfinite(edge), edge, means.mean) for edge in (means.low, means.high))
            lines.append({**line, "mean": means.mean, "low": low, "high": high})
    main = next((table for table in tables if table is not None), None)
    if not lines or main is None:
        return None
    maps = {outcome: data.heat_map(main, outcome or None) for outcome in ("", *data.OUTCOMES)}
    cells = maps[""].weights
    return {
        "steps": list(maps[""].steps),
        "heat": {outcome: found.weights for outcome, found in maps.items()},
        "all": lines,
        "limit": _weight_limit(cells[np.isfinite(cells)], 0.95),
    }


def _weight_limit(weights: np.ndarray, share: float = 0.98) -> float:
    """The least limit of the scale that tells this share of the weights apart."""
    for limit in _WEIGHT_LIMITS[:-1]:
        inside = (weights >= 1 / limit) & (weights <= limit)
        if not weights.size or inside.mean() >= share:
            return limit
    return _WEIGHT_LIMITS[-1]


def _limits(kept: Sequence[_Kept]) -> dict[str, float]:
    """Where the scales of the overlays end."""

    def values(name: str) -> np.ndarray:
        # Enough of them to know a percentile.
        some = kept[:: max(1, len(kept) // 256)]
        found = [value_T for one in some for key, value_T in one.columns.values.items() if key.split(":")[0] == name]
        joined = np.concatenate(found) if found else np.zeros(0, dtype=np.float32)
        return joined[np.isfinite(joined)]

    def high(of_values: np.ndarray, share: float, least: float) -> float:
        return _round_up(float(np.quantile(of_values, share)) if of_values.size else 0.0, least)

    advantages = np.abs(values("advantage"))
    weights = values("weight")
    return {
        "weight": _weight_limit(weights) if (weights != 1).any() else colours.WEIGHT_LIMIT,
        "advantage": high(advantages[advantages > 0], 0.98, 1e-6),
        "surprisal": high(values("surprisal"), 0.99, 1.0),
        "entropy": high(values("entropy"), 0.99, 0.5),
    }


def _round_up(value: float, least: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 7 times a power of ten."""
    value = max(value, least)
    power = 10.0 ** math.floor(math.log10(value))
    return next(float(f"{step * power:.6g}") for step in (1, 1.5, 2, 3, 5, 7, 10) if step * power >= value * (1 - 1e-9))


# ------------------------------------------------------------------------------------------------------------------- texts


def _names(folders: Sequence[Path]) -> list[str]:
    """Ends of the paths that tell the runs apart."""
    parts = []
    for folder in folders:
        whole = folder.resolve().parts
        parts.append(whole[:-1] if whole[-1] == data.TOKENS and len(whole) > 2 else whole)
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            # A run's folder is often named by its method alone.
            return ["/".join(part[-max(length, 3) :]).lstrip("/") for part in parts] if len(names) == 1 else names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _subtitle(runs: Sequence[data.Run], headers: Sequence[DumpHeader | None], collection: _Collection) -> str:
    said = []
    for header in headers[:1]:
        if header is not None:
            said += [header.method, Path(header.model).name]
    steps = sorted({step for run in runs for step in run.metrics} | {group["step"] for group in collection.groups})
    if len(steps) > 1:
        said.append(f"steps {steps[0]} to {steps[-1]}")
    if collection.kept:
        tokens = sum(len(kept.row) for kept in collection.kept)
        said.append(f"{len(collection.kept):,} rollouts, {tokens:,} tokens")
    return " · ".join(part for part in said if part)


def _foot(headers: Sequence[DumpHeader | None], bits: int, rounding: pack.Rounding, blocks: bool) -> list[str]:
    lines = []
    for header in headers[:1]:
        if header is None or not header.method:
            continue
        options = ", ".join(f"{name} {value}" for name, value in header.options.items() if value is not None)
        temperature = "" if header.temperature is None else f" Temperature {header.temperature:g}."
        lines.append(f"Method {header.method}{': ' + options if options else ''}.{temperature}")
    if blocks and bits == pack.EXACT:
        lines.append("Every value is the run's own, in float32.")
    elif blocks:
        names = {"weight": "weights", "score": "scores", "surprisal": "surprisals", "entropy": "entropies"}
        apart = ", ".join(
            f"{said} by at most {rounding.largest[n]:.2g}" for n, said in names.items() if n in rounding.largest
        )
        lines.append(
            f"To keep the file small, values are rounded to {pack.levels_of('weight', bits):,} levels over each response's own "
            f"range, surprisal and entropy to {pack.levels_of('entropy', bits):,}: {apart}. The token dump has them exactly."
        )
    lines.append(
        f"Written by grail_advantage {__version__}. This file needs no network. Plots: uPlot 1.6.32, MIT licence."
    )
    return lines


def _nothing(runs: Sequence[data.Run]) -> str:
    if runs[0].dump is None:
        return (
            "This run wrote no token dump, so there are no rollouts to read. Train with +algorithm.token_dump.folder=FOLDER "
            f"({data.TOKENS} in the run's folder) to see every token's weight here."
        )
    return "The token dump holds no rollout that can be read; the notes at the top say what is wrong with it."


def _plain(value: Any) -> Any:
    """JSON values: arrays as lists, what is not finite as null."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


# ------------------------------------------------------------------------------------------------------------------ the file


def _page(title: str, index: dict[str, Any], vocabulary: str, blocks: Sequence[str]) -> str:
    assets = resources.files("grail_advantage.report") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    uplot = assets / "uplot"
    style = _style(read("report.css")) + (uplot / "uPlot.min.css").read_text(encoding="utf-8")
    scripts = [(uplot / "uPlot.iife.min.js").read_text(encoding="utf-8"), read("report.js")]
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
        "INDEX": pack.encode_json(index),
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
