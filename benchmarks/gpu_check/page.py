"""Writes the end of ``docs/gpu.md`` from the results: every figure comes from them, and a part without a result was not run.

PYTHONPATH=.:benchmarks python -m gpu_check.page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check.outcome import NOT_RUN
from gpu_check.parts import PARTS, ROOT, Part, result_path
from recipe.marked_text import table, write_marked

RESULTS = ROOT / "benchmarks" / "results" / "gpu_check"
PAGE = ROOT / "docs" / "gpu.md"
MARKER = "results"
INTERRUPTED = "interrupted"
"""Status of a part whose result the process that started it never completed."""
NOTHING = "Nothing has been run on a GPU yet."


def named(path: Path) -> str:
    """A path as the page calls it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def write_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Put the results of a folder between the markers of the page."""
    write_marked(page, MARKER, render(folder))


def render(folder: Path) -> str:
    """The text between the page's markers."""
    results = {}
    for letter, part in PARTS.items():
        path = result_path(folder, part)
        if path.is_file():
            results[letter] = json.loads(path.read_text(encoding="utf-8"))
    if not results:
        return NOTHING
    lines = []
    if all(result.get("status") == NOT_RUN for result in results.values()):
        lines += [NOTHING, ""]
    for letter, part in PARTS.items():
        lines += _part(part, results.get(letter))
    return "\n".join(lines).strip()


def _part(part: Part, result: Mapping[str, Any] | None) -> list[str]:
    lines = [f"### {part.letter}: {part.title}", ""]
    if result is None:
        return [*lines, "**not run**", ""]
    if "command" in result:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        revision = f", revision {result['revision']}" if "revision" in result else ""
        lines += [f"`{result['command']}`, {result['date']}{revision}. {result['hardware']}. {versions}.", ""]
    took = f", {result['seconds']:.0f} s" if "seconds" in result else ""
    lines += [f"**{result.get('status', INTERRUPTED)}**{took}", ""]
    if result["checks"]:
        rows = [[check["name"], check["status"], check["said"]] for check in result["checks"]]
        lines += [*table(["check", "", "found"], rows), ""]
    for name, values in result["figures"].items():
        kind, _, of = name.partition(", ")
        lines += _SECTIONS[kind](of, values)
    return lines


def _precision(shape: str, methods: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [
        f"Shape of {shape}, random weights: token weights in bfloat16 less those in float32.",
        "",
        "| method | mean | 99 % below | largest | the weights' own deviation | rank correlation of the scores |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for method, figures in methods.items():
        cells = " | ".join(f"{figures[key]:.4f}" for key in ("mean", "q99", "max", "deviation", "rank_correlation"))
        lines.append(f"| {method} | {cells} |")
    return [*lines, ""]


def _passes(shape: str, figures: Mapping[str, Any]) -> list[str]:
    ways = figures["ways"]
    forward = ways.get("forward", {}).get("seconds")
    lines = [
        f"Shape of {shape}, bfloat16, one row of {figures['tokens']} tokens, seconds the median of the runs; "
        f"{_gibibytes(figures['base_bytes'])} GiB are parameters.",
        "",
        "| pass | seconds | x the forward | peak memory, GiB | above the parameters |",
        "|---|--:|--:|--:|--:|",
    ]
    for way, values in ways.items():
        if values.get("out_of_memory"):
            lines.append(f"| {way} | | | out of memory | |")
            continue
        seconds = statistics.median(values["seconds"])
        times = f"{seconds / statistics.median(forward):.2f}" if forward else ""
        above = _gibibytes(values["peak_bytes"] - figures["base_bytes"])
        lines.append(f"| {way} | {seconds:.3f} | {times} | {_gibibytes(values['peak_bytes'])} | {above} |")
    return [*lines, ""]


def _training_side(of: str, figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Shape of {of}. Layers: {figures['layers']}. Attention: {figures['attention']}. Parameters: "
        f"{figures['parameters']}. Batch: {figures['batch']}.",
        "",
    ]
    if repeats := figures["repeats"]:
        epochs = sorted({1, figures["epochs"]})
        named = [f"{count} epoch{'s' if count > 1 else ''}" for count in epochs]
        lines += [
            f"Lowest to highest of {len(repeats)} repeats; seconds are medians, without skipping every row runs.",
            "",
        ]
        head = ["variant", *(f"{name}, {what}" for name in named for what in ("seconds", "x GRPO"))]
        rows = []
        for variant in repeats[0]:
            row = [variant]
            for count in epochs:
                seconds = [sum(repeat[variant][: count + 1]) for repeat in repeats]
                shares = [
                    total / sum(repeat["GRPO"][: count + 1]) for total, repeat in zip(seconds, repeats, strict=True)
                ]
                spread = f"({min(shares):.3f} to {max(shares):.3f})"
                row += [f"{statistics.median(seconds):.2f}", f"{statistics.median(shares):.3f} {spread}"]
            rows.append(row)
        lines += [*table(head, rows, right=1), ""]
    if peaks := figures["peak_bytes"]:
        update = peaks["actor update"]
        rows = [[stage, _gibibytes(peak), f"{peak / update:.2f}"] for stage, peak in peaks.items()]
        lines += [*table(["stage", "peak memory, GiB", "x the update's"], rows, right=1), ""]
    return lines


def _curve(name: str, steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    seconds = [values["seconds"] for values in steps.values() if "seconds" in values]
    took = f", {statistics.median(seconds):.2f} s a step (median of {len(seconds)})" if seconds else ""
    rows = [
        [step, *(f"{values[key]:.3f}" if key in values else "" for key in ("accuracy", "reward"))]
        for step, values in steps.items()
    ]
    return [f"Run of {name}{took}.", "", *table(["step", "held-out accuracy", "mean reward"], rows, right=1), ""]


def _step(of: str, figures: Mapping[str, Any]) -> list[str]:
    return [f"{of[:1].upper()}{of[1:]}:", "", *table(["", ""], figures.items(), right=1), ""]


_SECTIONS = {
    "precision": _precision,
    "passes": _passes,
    "training side": _training_side,
    "curve": _curve,
    "step": _step,
}


def _gibibytes(size: float) -> str:
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    write_page()
