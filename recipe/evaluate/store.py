"""Generations on disk, a line a problem, so that a stopped evaluation resumes where it was.

The first line of ``OUTPUT/generations.jsonl`` holds the settings of all of them. Every other line is a problem with all its
samples, appended as soon as the last of them is there.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

Samples = list[dict[str, Any]]
"""One problem's samples in order, each with ``seed``, ``tokens`` (with the end token), ``finish_reason`` and ``text``."""
_SAMPLE = ("seed", "tokens", "finish_reason", "text")
_REMEDY = "use the former, choose another --output-dir, or delete the old generations with --restart"


class Store:
    """The generations of an output folder; a context manager that holds their file open and locked.

    Args:
        path: created if need be.
        settings: all that decides the samples beside the prompts; must equal those that an existing file was begun with.
        prompts: by benchmark, a hash of each problem's prompt.

    Raises:
        ValueError: settings or prompts differ, the file is damaged other than in its last line, or it is in use.
    """

    def __init__(self, path: Path, settings: dict[str, Any], prompts: dict[str, list[str]]) -> None:
        self.path, self._prompts = path, prompts
        self.finished: dict[str, dict[int, Samples]] = {name: {} for name in prompts}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def missing(self) -> list[tuple[str, int]]:
        """Benchmark and index of every problem that has no samples yet."""
        return [
            (name, i)
            for name, hashes in self._prompts.items()
            for i in range(len(hashes))
            if i not in self.finished[name]
        ]

    def append(self, name: str, index: int, samples: Samples) -> None:
        """Keep a finished problem; it is on the disk when this returns."""
        self._write({"benchmark": name, "index": index, "prompt": self._prompts[name][index], "samples": samples})
        self.finished[name][index] = samples

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write((json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path}: another evaluation is writing to it; give this one its own --output-dir"
            ) from None

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not _is_whole(lines[-1]):
            # The process was stopped while it wrote this line. Its problem is sampled again.
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if not lines:
            return self._write({"settings": settings})
        try:
            recorded = dict(json.loads(lines[0])["settings"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.path}, line 1: not the settings of an evaluation; delete it with --restart"
            ) from None
        differences = [
            f"{key} {recorded.get(key)!r} there, {settings.get(key)!r} now"
            for key in {**settings, **recorded}
            if recorded.get(key) != settings.get(key)
        ]
        if differences:
            raise ValueError(f"{self.path} was begun with other settings: {'; '.join(differences)}; {_REMEDY}")
        for number, line in enumerate(lines[1:], 2):
            self._keep(number, line, settings["samples"])

    def _keep(self, number: int, line: bytes, count: int) -> None:
        try:
            record = json.loads(line)
            name, index, prompt = record["benchmark"], record["index"], record["prompt"]
            samples = [{key: sample[key] for key in _SAMPLE} for sample in record["samples"]]
            if len(samples) != count or index in self.finished.get(name, ()):
                raise ValueError(f"{len(samples)} samples, or problem {index} twice")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number}: damaged ({error!r}); remove the line") from None
        if name in self._prompts:  # else a benchmark that is not asked for this time
            if index not in range(len(self._prompts[name])) or prompt != self._prompts[name][index]:
                raise ValueError(
                    f"{self.path} was begun with other problems or prompts of {name} (line {number}); {_REMEDY}"
                )
            self.finished[name][index] = samples


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")
