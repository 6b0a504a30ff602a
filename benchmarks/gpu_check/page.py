"""``page.md`` of a folder of results: every figure comes from them, and a part without a result was not run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Part, result_path
from recipe.marked_text import table

INTERRUPTED = "interrupted"
"""Status of a part whose result the process that started it never completed."""


def write_page(folder: Path) -> Path:
    """Write the page and return its path."""
    lines = ["# GPU check", ""]
    for part in PARTS.values():
        path = result_path(folder, part)
        lines += _part(part, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None)
    page = folder / "page.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _part(part: Part, result: Mapping[str, Any] | None) -> list[str]:
    lines = [f"## {part.letter}: {part.title}", ""]
    if result is None:
        return [*lines, "**not run**", ""]
    if "command" in result:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines += [f"`{result['command']}`, {result['date']}. {result['hardware']}. {versions}.", ""]
    took = f", {result['seconds']:.0f} s" if "seconds" in result else ""
    lines += [f"**{result.get('status', INTERRUPTED)}**{took}", ""]
    if result["checks"]:
        rows = [[check["name"], check["status"], check["said"]] for check in result["checks"]]
        lines += [*table(["check", "", "found"], rows), ""]
    for name, figures in result["figures"].items():
        rows = figures["rows"]
        columns = list(dict.fromkeys(column for of_row in rows.values() for column in of_row))
        cells = [[label, *(cell(of_row.get(column, "")) for column in columns)] for label, of_row in rows.items()]
        lines += [f"{name}. {figures['note']}".strip(), "", *table(["", *columns], cells, right=1), ""]
    return lines


def cell(value: Any) -> str:
    """Numbers with four figures; of several the median, with lowest and highest."""
    if isinstance(value, list):
        return f"{cell(statistics.median(value))} ({cell(min(value))} to {cell(max(value))})" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
