"""Rows from a local JSONL file or from the Hugging Face hub, each with the number a person needs to find it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from recipe.data.specs import SPECS, HubLocation

if TYPE_CHECKING:
    from datasets import Dataset

Row = tuple[int, dict[str, Any]]
"""A row's 1-based number in its source, and its fields."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. ``reason`` is the same for all rows of a kind, so that they can be counted."""

    source: str
    place: str
    field: str | None
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        field = f"field {self.field!r}: " if self.field else ""
        return f"{self.source}, {self.place}: {field}{self.reason}{f' ({self.detail})' if self.detail else ''}"


class MissingSourceError(ValueError):
    """A dataset's local file is not there."""


class Source(Protocol):
    """A source of rows."""

    unit: str
    """The unit of row numbers in messages: ``line`` or ``row``."""

    def __str__(self) -> str: ...

    def columns(self) -> list[str]:
        """Every field that at least one row has, in order of appearance."""

    def rows(self, wanted: Collection[str]) -> tuple[list[Row], list[BadRow]]:
        """Return the readable rows, with at least the ``wanted`` fields they have, and the unreadable ones."""

    def digest(self, wanted: Collection[str]) -> str:
        """SHA-256 of the source's content, or of its ``wanted`` columns alone."""


class LocalFile:
    """A JSONL file: one JSON object a line, UTF-8, blank lines ignored."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def _content(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def _parsed(self) -> tuple[list[Row], list[BadRow]]:
        rows: list[Row] = []
        bad: list[BadRow] = []
        lines = self._content.split(b"\n")
        for number, line in enumerate(tqdm(lines, desc=f"reading {self.path.name}", unit=" lines", leave=False), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                bad.append(BadRow(str(self), f"line {number}", None, "not valid JSON", str(error)))
                continue
            if isinstance(value, dict):
                rows.append((number, value))
            else:
                bad.append(BadRow(str(self), f"line {number}", None, "not a JSON object", type(value).__name__))
        return rows, bad

    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, row in self._parsed[0] for name in row))

    def rows(self, wanted: Collection[str]) -> tuple[list[Row], list[BadRow]]:
        return self._parsed

    def digest(self, wanted: Collection[str]) -> str:
        return hashlib.sha256(self._content).hexdigest()


class HubDataset:
    """A split of a dataset on the hub, downloaded (or taken from the hub's cache) by ``datasets.load_dataset``."""

    unit = "row"

    def __init__(self, name: str, location: HubLocation) -> None:
        self.name = name
        self.location = location

    def __str__(self) -> str:
        return f"hub dataset {self.location}"

    @cached_property
    def _dataset(self) -> Dataset:
        import datasets

        location = self.location
        try:
            return datasets.load_dataset(location.dataset_id, location.config, split=location.split)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{self.name}: cannot load {self} ({type(error).__name__}: {error}); check the network and the id, or "
                f"give another one with --hub-id {self.name}=ORG/DATASET[:CONFIG[:SPLIT]], or put {self.name}.jsonl in "
                "a folder and name that with --local-dir"
            ) from error

    def columns(self) -> list[str]:
        return list(self._dataset.column_names)

    def rows(self, wanted: Collection[str]) -> tuple[list[Row], list[BadRow]]:
        # Only the columns that are read: some copies carry pictures, which would all be decoded.
        chosen = self._dataset.select_columns([name for name in self.columns() if name in wanted])
        return list(enumerate(chosen, 1)), []

    def digest(self, wanted: Collection[str]) -> str:
        digest = hashlib.sha256()
        for row in self.rows(wanted)[0]:
            digest.update(json.dumps(row, default=str).encode())
        return digest.hexdigest()


def find_local_file(name: str, folder: Path) -> LocalFile:
    """Find ``NAME.jsonl`` or the one ``NAME_*.jsonl`` in ``folder``.

    Raises:
        MissingSourceError: there is no such file.
        ValueError: several files match ``NAME_*.jsonl``.
    """
    exact = folder / f"{name}.jsonl"
    if exact.is_file():
        return LocalFile(exact)
    candidates = sorted(path for path in folder.glob(f"{name}_*.jsonl") if path.is_file())
    if not candidates:
        raise MissingSourceError(
            f"{name}: no {name}.jsonl or {name}_*.jsonl in --local-dir {folder}; "
            f"--hub-id {name}={SPECS[name].hub.dataset_id} reads it from the hub"
        )
    if len(candidates) > 1:
        raise ValueError(
            f"{name}: --local-dir {folder} has several files for it: {', '.join(path.name for path in candidates)}; "
            f"rename the one to use to {name}.jsonl"
        )
    return LocalFile(candidates[0])
