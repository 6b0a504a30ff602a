"""The study's raw data: CSV files in the repository, one finished row after another, whole at any moment."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grail_advantage.view.whole_file import write_whole

JOB_COLUMNS = ("kind", "regime", "arm", "seed", "rate")
"""Columns that identify a job; the arm of a job that has none is ``-``, its rate 0."""
COMMON = ("job_seconds", "settings", "versions")
"""Processor time of the whole job; a digest of the settings that its figures depend on; of which packages."""


@dataclass(frozen=True)
class RawFile:
    """One file. Numbers are written so that reading them gives the same number."""

    path: Path
    columns: tuple[str, ...]

    def read(self) -> list[dict[str, str]]:
        """All rows; none where there is no file.

        Raises:
            ValueError: other columns, or a row with too few or too many fields.
        """
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        head = tuple(reader.fieldnames or ())
        if head != self.columns:
            wanted = f"has the columns {', '.join(head)}; wanted are {', '.join(self.columns)}"
            raise ValueError(f"{self.path} {wanted}. Restore the file, or name another folder with --data-dir")
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise ValueError(f"{self.path}, line {number} has not {len(head)} fields")
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add finished rows: the whole file is written beside the old one and takes its place, so that a crash loses nothing.

        Raises:
            ValueError: a row with other fields.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=self.columns, lineterminator="\n")
        if not self.path.exists():
            writer.writeheader()
        for row in rows:
            if set(row) != set(self.columns):
                raise ValueError(f"{self.path}: a row has the fields {sorted(row)}; wanted are {sorted(self.columns)}")
            writer.writerow(row)
        before = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        write_whole(self.path, before + text.getvalue())
