"""Generations on disk, a line a problem, so that a stopped evaluation resumes where it was.

``OUTPUT/generations/NAME.jsonl``: the first line holds the settings, every other one a problem with all its samples,
appended as soon as the last of them is there. A finished file is sorted by problem, so that it does not depend on which
sample happened to end first.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from recipe.evaluate.files import json_line, write_text

Settings = Mapping[str, Any]
_REMEDY = "use the former, choose another --output-dir, or delete the old generations with --restart"
_BENCHMARK_KEYS = ("benchmark", "problems", "prompts")
_MEANINGS = {
    "problems": "problems (their texts, as a hash)",
    "prompts": "prompts (token ids from tokenizer and chat template, as a hash)",
    "model": "model (its files, as a hash)",
}


@dataclass(frozen=True)
class Sample:
    """One response. ``tokens`` counts generated tokens with the end token; ``finish_reason``: ``stop`` or ``length``."""

    seed: int
    tokens: int
    finish_reason: str
    text: str


@dataclass(frozen=True)
class Generation:
    """All samples of one problem, in the order of their numbers."""

    index: int
    samples: tuple[Sample, ...]


def generation_path(output_dir: Path, benchmark: str) -> Path:
    return output_dir / "generations" / f"{benchmark}.jsonl"


def check_settings(output_dir: Path, settings: Settings) -> None:
    """Compare ``settings`` with those of every file of generations in ``output_dir``.

    ``settings["benchmark"]`` says which file must agree in everything; the others may hold other problems.

    Raises:
        ValueError: they differ; the message names every difference.
    """
    for path in sorted((output_dir / "generations").glob("*.jsonl")):
        with path.open("rb") as file:
            first = file.readline()
        if not first.endswith(b"\n"):
            continue  # the first line was never finished, so the file holds nothing
        recorded = _header(path, first)
        ignored = () if path == generation_path(output_dir, settings["benchmark"]) else _BENCHMARK_KEYS
        _compare(path, recorded, settings, ignored)


class GenerationFile:
    """The generations of one benchmark; a context manager that holds the file open and locked.

    Args:
        path: created if need be.
        settings: everything that decides the generations; must be equal to those that an existing file was begun with.
        problems: how many the benchmark has.

    Raises:
        ValueError: the settings differ, the file is damaged other than in its last line, or another process writes to it.
    """

    def __init__(self, path: Path, settings: Settings, problems: int) -> None:
        self.path = path
        self.finished: dict[int, Generation] = {}
        self._header_line = json_line({"settings": dict(settings)})
        self._settings = settings
        self._problems = problems
        self._file: IO[bytes] | None = None

    def __enter__(self) -> GenerationFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path}: another evaluation is writing to it; give this one its own --output-dir"
                ) from None
            self._file = file
            self._read()
        except BaseException:
            file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and len(self.finished) == self._problems:
            lines = [_line(self.finished[index]) for index in sorted(self.finished)]
            write_text(self.path, self._header_line + "".join(lines))

    def missing(self) -> list[int]:
        """Problems that have no generations yet."""
        return [index for index in range(self._problems) if index not in self.finished]

    def append(self, generation: Generation) -> None:
        """Keep a finished problem; it is on the disk when this returns."""
        self._write(_line(generation))
        self.finished[generation.index] = generation

    def _write(self, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not _is_whole(lines[-1]):
            # The process was stopped while it wrote this line. Its problem is generated again.
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if not lines:
            self._write(self._header_line)
            return
        _compare(self.path, _header(self.path, lines[0]), self._settings, ())
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                generation = Generation(record["index"], tuple(Sample(**sample) for sample in record["samples"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: damaged ({error!r}); remove the line") from None
            if generation.index not in range(self._problems) or generation.index in self.finished:
                raise ValueError(
                    f"{self.path}, line {number}: problem {generation.index!r} is out of range or there twice; remove the line"
                )
            if len(generation.samples) != self._settings["samples"]:
                raise ValueError(f"{self.path}, line {number}: {len(generation.samples)} samples; remove the line")
            self.finished[generation.index] = generation


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")


def _line(generation: Generation) -> str:
    return json_line({"index": generation.index, "samples": [asdict(sample) for sample in generation.samples]})


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(line)["settings"]
        if isinstance(settings, dict):
            return settings
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path}, line 1: not the settings of an evaluation; delete the file with --restart")


def _compare(path: Path, recorded: Settings, wanted: Settings, ignored: tuple[str, ...]) -> None:
    differences = [
        f"{_MEANINGS.get(key, key)} {recorded.get(key)!r} there, {wanted.get(key)!r} now"
        for key in {**wanted, **recorded}
        if key not in ignored and recorded.get(key) != wanted.get(key)
    ]
    if differences:
        raise ValueError(f"{path} was begun with other settings: {'; '.join(differences)}; {_REMEDY}")
