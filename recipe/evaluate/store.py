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
FIELDS = (*KEY, "prompt", "seed", "tokens", "finish_reason", "text")
"""``prompt`` is a hash of its token ids; ``tokens`` counts the end token; ``finish_reason`` is ``stop`` or ``length``."""
_REMEDY = "use the former, choose another --output-dir, or delete the old generations with --restart"
key_of = itemgetter(*KEY)


class Store(AbstractContextManager):
    """The samples of an output folder, by :data:`KEY`; holds their file open and locked.

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
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{path}: another evaluation is writing to it; give this one its own --output-dir"
            ) from None
        except BaseException:
            self._file.close()
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
        """Keep a sample, which has all :data:`FIELDS`; it is on the disk when this returns."""
        self._write(sample)
        self.samples[key_of(sample)] = sample

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        there = None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line if line.endswith(b"\n") else b"")
                if there is None:
                    there = dict(record["settings"])
                    continue
                sample = {name: record[name] for name in FIELDS}
                if key_of(sample) in self.samples:
                    raise KeyError("twice")
                self.samples[key_of(sample)] = sample
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) and isinstance(error, ValueError):
                    self._file.truncate(sum(map(len, lines[:-1])))  # the process was stopped while it wrote this line
                    break
                remedy = "remove the line" if number > 1 else "begin anew with --restart"
                raise ValueError(f"{self.path}, line {number}: damaged ({error!r}); {remedy}") from None
        if there is None:
            self._write({"settings": settings})
        elif names := [name for name in {**settings, **there} if settings.get(name) != there.get(name)]:
            differences = "; ".join(f"{name} {there.get(name)!r} there, {settings.get(name)!r} now" for name in names)
            raise ValueError(f"{self.path} was begun with other settings: {differences}; {_REMEDY}")
