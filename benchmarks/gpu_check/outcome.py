"""The results of a part: checks that hold or do not, and figures; on the disk at once, so that a part which is stopped leaves
those before. ``PART.json`` has everything, ``PART.md`` shows it."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipe.marked_text import table

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
UNFINISHED = "running, or stopped before its end"


class Outcome:
    """The results of one part.

    Args:
        folder: for its two files.
        record: where and how the part runs; the first letter of its ``name`` is the part's.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.path = folder / f"{record['name'][0]}.json"
        self.page = self.path.with_suffix(".md")
        self.result: dict[str, Any] = {**record, "status": UNFINISHED, "checks": [], "figures": {}}
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def check(self, name: str, holds: bool | None, detail: str) -> None:
        """Something that must be so: in words, whether it is (``None``: it could not be checked here), and the measured value
        with its limit, or why not."""
        status = NOT_RUN if holds is None else PASSED if holds else FAILED
        self.result["checks"].append({"name": name, "status": status, "said": detail})
        self._save()

    def figures(self, name: str, rows: Mapping[str, Mapping[str, Any]], note: str = "") -> None:
        """Something measured that has no limit, as a table: by row and column a number, a text or several numbers."""
        self.result["figures"][name] = {"note": note, "rows": rows}
        self._save()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A group of checks and figures; what it raises is a failed check, and the next group still runs. Too little memory on
        the device, or a package that is missing, is no failure: the group was not run."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.check(name, None, "the GPU's memory is too small for it")
        except ModuleNotFoundError as error:
            self.check(name, None, f"{sys.executable} lacks {error.name}: docs/gpu.md, the check")
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])

    def finish(self) -> str:
        """The status at the end: failed where a check did, passed where one did and none failed, else not run."""
        statuses = {check["status"] for check in self.result["checks"]}
        self.result["status"] = next((status for status in (FAILED, PASSED) if status in statuses), NOT_RUN)
        self._save()
        return self.result["status"]

    def _save(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self._began, 1)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        self.page.write_text("\n".join(page(self.result)), encoding="utf-8")


def origin(result: Mapping[str, Any]) -> str:
    """How, when and where a result was made."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"`{result['command']}`, {result['date']}. {result['hardware']}. {versions}."


def page(result: Mapping[str, Any]) -> list[str]:
    """The results of a part in Markdown, by lines."""
    lines = [f"## {result['name']}", "", origin(result), "", f"**{result['status']}**, {result['seconds']:.0f} s", ""]
    rows = [[check["name"], check["status"], check["said"]] for check in result["checks"]]
    lines += [*table(["check", "", "found"], rows), ""]
    for name, figures in result["figures"].items():
        rows = figures["rows"]
        columns = list(dict.fromkeys(column for of_row in rows.values() for column in of_row))
        cells = [[label, *(cell(of_row.get(column, "")) for column in columns)] for label, of_row in rows.items()]
        lines += [f"{name}. {figures['note']}".strip(), "", *table(["", *columns], cells, right=1), ""]
    return lines


def cell(value: Any) -> str:
    """Numbers with four figures; of several the median, lowest and highest, and how probably the true median is between."""
    if isinstance(value, list):
        likely = f", {1 - 0.5 ** (len(value) - 1):.0%}" if len(value) > 1 else ""
        return f"{cell(statistics.median(value))} ({cell(min(value))} to {cell(max(value))}{likely})" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
