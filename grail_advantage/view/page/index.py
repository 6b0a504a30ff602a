"""The index of a page: everything but the values a token, as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grail_advantage.view.dump.files import DumpHeader
from grail_advantage.view.page import by_position, colours, data
from grail_advantage.view.page.collection import Collection, Kept

_WEIGHT_LIMITS = (1.25, 2.0, colours.WEIGHT_LIMIT)
_OVERLAYS = ("weight", "score", "advantage", "surprisal", "entropy")


def methods_of(headers: Sequence[DumpHeader | None], collection: Collection) -> list[str]:
    """Names of the methods, in the dump's order."""
    compared = list(dict.fromkeys(name for kept in collection.kept for name in kept.facts["neutrals"] or ()))
    named = [header.method for header in headers if header is not None and header.method]
    return compared or named[:1] or ["weights"]


def overlays(kept: Sequence[Kept]) -> list[str]:
    """Values that tokens can be coloured by; the first is what the page shows first."""
    known = {name.split(":")[0] for one in kept for name in one.columns.values}
    found = [name for name in _OVERLAYS if name in known] or ["weight"]
    if any(one.facts["given"] for one in kept):  # the weights say nothing
        found = ["advantage", *(name for name in found if name != "advantage")]
    return found


def rows(kept: Sequence[Kept]) -> dict[str, list[Any]]:
    """The rollouts' entries, a list a name."""
    names = kept[0].facts if kept else ("step", "length", "spread", "wrong_step", "run", "group")
    return {name: [one.facts[name] for one in kept] for name in names}


def curves(runs: Sequence[data.Run]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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


def positions(
    runs: Sequence[data.Run], tables: Sequence[by_position.RowTable | None], methods: Sequence[str]
) -> dict[str, Any]:
    """Mean weights by place, for each method."""
    by_method = {}
    for method in methods:
        # The tables are of the plain columns; of several methods, each needs another reading.
        of_method = tables
        if len(methods) > 1:
            of_method = [
                None if run.dump is None else by_position.row_table(run.dump.rows(), method=method) for run in runs
            ]
        if (position := _position(of_method)) is not None:
            by_method[method] = position
    return by_method


def _position(tables: Sequence[by_position.RowTable | None]) -> dict[str, Any] | None:
    lines = []
    for run, table in enumerate(tables):
        if table is None:
            continue
        scored = table.where(table.scored)
        outcomes = [outcome for outcome in by_position.OUTCOMES if (scored.outcomes == outcome).any()] or [""]
        for outcome in outcomes:
            chosen = scored.where(scored.outcomes == outcome)
            if not len(chosen) or not np.isfinite(chosen.profiles).any():
                continue
            means = by_position.clustered_means(chosen.profiles, chosen.groups)
            line = {"outcome": outcome, "run": run, "rows": means.rows}
            # Without a second problem there is no interval.
            low, high = (np.where(np.isfinite(edge), edge, means.mean) for edge in (means.low, means.high))
            lines.append({**line, "mean": means.mean, "low": low, "high": high})
    main = next((table for table in tables if table is not None), None)
    if not lines or main is None:
        return None
    maps = {outcome: by_position.heat_map(main, outcome or None) for outcome in ("", *by_position.OUTCOMES)}
    cells = maps[""].weights
    return {
        "steps": list(maps[""].steps),
        "heat": {outcome: heat.weights for outcome, heat in maps.items()},
        "all": lines,
        "limit": _weight_limit(cells[np.isfinite(cells)], 0.95),
    }


def _weight_limit(weights: np.ndarray, share: float = 0.98) -> float:
    """The least limit of a scale on which this share of the weights differs in colour."""
    for limit in _WEIGHT_LIMITS[:-1]:
        inside = (weights >= 1 / limit) & (weights <= limit)
        if not weights.size or inside.mean() >= share:
            return limit
    return _WEIGHT_LIMITS[-1]


def limits(kept: Sequence[Kept]) -> dict[str, float]:
    """Where the scales of the overlays end."""

    def values(name: str) -> np.ndarray:
        # Enough of them to know a percentile.
        some = kept[:: max(1, len(kept) // 256)]
        arrays = [value_T for one in some for key, value_T in one.columns.values.items() if key.split(":")[0] == name]
        joined = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.float32)
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


def plain(value: Any) -> Any:
    """JSON values: arrays as lists, what is not finite as null."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
