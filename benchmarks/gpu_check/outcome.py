"""The outcome of a part: checks that hold or do not, and figures. Each is on the disk at once, so that a part which is stopped
leaves those before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class Outcome:
    """The result of one part.

    Args:
        path: the JSON file that is kept up to date.
        record: where and how the part runs; checks and figures are added.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
        self.result: dict[str, Any] = {**record, "checks": [], "figures": {}}
        self._save()

    def check(self, name: str, holds: bool, detail: str) -> None:
        """Something that must be so.

        Args:
            name: what must be so, in words.
            holds: whether it is.
            detail: the measured value, with its limit.
        """
        self._add(name, PASSED if holds else FAILED, detail)

    def not_run(self, name: str, why: str) -> None:
        """Something that could not be checked here."""
        self._add(name, NOT_RUN, why)

    def figures(self, name: str, rows: Mapping[str, Mapping[str, Any]], note: str = "") -> None:
        """Something measured that has no limit, as a table.

        Args:
            name: its heading.
            rows: by label, a number, a text or several numbers for each column.
            note: what the table is of.
        """
        self.result["figures"][name] = {"note": note, "rows": rows}
        self._save()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A group of checks and figures; what it raises is a failed check, and the next group still runs. Too little memory on
        the device is no failure: the group was not run."""
        import torch

        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.not_run(name, "the GPU's memory is too small for it")
        except Exception as error:
            self.check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _add(self, name: str, status: str, detail: str) -> None:
        self.result["checks"].append({"name": name, "status": status, "said": detail})
        self._save()

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def status_of(checks: list[dict[str, str]]) -> str:
    """Of a part: failed where a check did, passed where one did and none failed, else not run."""
    statuses = {check["status"] for check in checks}
    return next((status for status in (FAILED, PASSED) if status in statuses), NOT_RUN)
