"""Samples on disk, a line each, so that a stopped evaluation resumes where it was.

The first line of ``OUTPUT/generations.jsonl`` holds the settings of all samples. A sample is appended as soon as it is there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from pathlib import Path
from typing import Any

KEY = ("benchmark", "index", "sample")
"""A sample's name."""
_REMEDY = "use the former, choose another --output-dir, or delete the old generations with --restart"
key_of = itemgetter(*KEY)


class Store(AbstractContextManager):
    """The samples of an output folder, by :data:`KEY`; holds their file open and locked.

    A sample has its key and ``prompt`` (a hash of the token ids), ``seed``, ``tokens`` (with the end token),
    ``finish_reason`` (``stop`` or ``length``) and ``text``.

    Raises:
        ValueError: the file was begun with other settings, is damaged other than in its last line, or is in use.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.samples: dict[tuple, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(settings)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                message = "another evaluation is writing to it; give this one its own --output-dir"
                raise ValueError(f"{path}: {message}") from None
            raise

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def missing(self, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those of the ``wanted`` samples (key and prompt) that are not there; ValueError where a prompt is another."""
        for sample in wanted:
            key = key_of(sample)
            if self.samples.get(key, sample)["prompt"] != sample["prompt"]:
                raise ValueError(f"{self.path} was begun with another prompt for problem {key[:2]}; {_REMEDY}")
        return [sample for sample in wanted if key_of(sample) not in self.samples]

    def append(self, sample: dict[str, Any]) -> None:
        """Keep a sample; it is on the disk when this returns."""
        self._write(sample)
        self.samples[key_of(sample)] = sample

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        lines, records = self._file.read().splitlines(keepends=True), []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line if line.endswith(b"\n") else b""))
            except ValueError as error:
                if number < len(lines):
                    raise ValueError(f"{self.path}, line {number}: damaged ({error}); remove the line") from None
                self._file.truncate(sum(map(len, lines[:-1])))  # the process was stopped while it wrote this line
        if not records:
            self._write({"settings": settings})
            return
        self.samples = {key_of(sample): sample for sample in records[1:]}
        there = records[0]["settings"]
        if names := [name for name in {**settings, **there} if settings.get(name) != there.get(name)]:
            differences = "; ".join(f"{name} {there.get(name)!r} there, {settings.get(name)!r} now" for name in names)
            raise ValueError(f"{self.path} was begun with other settings: {differences}; {_REMEDY}")
