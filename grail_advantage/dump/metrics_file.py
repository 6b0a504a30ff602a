"""A run's figures, beside the training: ``metrics.jsonl``, a line ``{"step": S, "data": {...}}`` for each log."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any

from grail_advantage.dump.whole_file import write_whole

logger = logging.getLogger(__name__)


class MetricsFile:
    """Keeps the lines of earlier steps, and adds lines. It stops nothing: what goes wrong loses a line, counted in ``failed``
    and logged once.

    It serves as the open file of verl's ``FileLogger``, too.

    Args:
        path: of the file, taken from the folder that is the working folder now.
        last: the step whose line is the last that stays; -1 for none. Half a line, or one of another program, goes as well.
    """

    def __init__(self, path: Path | str, last: int) -> None:
        self.path = Path(path).absolute()
        self.failed = 0
        """Lines that were to be written and were not, and 1 where the old ones could not be read."""
        self._half = False
        with self._attempt("its earlier lines stay as they are"):
            if self.path.is_file():
                self._keep(last)

    def _keep(self, last: int) -> None:
        content = self.path.read_bytes()
        kept = b"".join(line + b"\n" for line in content.splitlines() if _step(line) <= last)
        if content.startswith(kept):  # which a full disk takes as well
            os.truncate(self.path, len(kept))
        else:
            write_whole(self.path, kept)

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add a line of the figures that are numbers."""
        with self._attempt("a line of it is lost"):
            data = {
                str(name): int(value) if isinstance(value, int) else float(value)
                for name, value in figures.items()
                if isinstance(value, Real)
            }
            self._append(json.dumps({"step": step, "data": data}).encode() + b"\n")

    def write(self, line: bytes) -> None:
        """Add a line that ends as one."""
        with self._attempt("a line of it is lost"):
            self._append(line)

    def close(self) -> None:
        """Nothing is open between two lines."""

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            line = b"\n" + line if self._half and end else line
            try:
                while line:  # the last bytes of a disk take a part
                    line = line[file.write(line) :]
            except OSError:
                self._half = True
                with suppress(OSError):
                    file.truncate(end)
                    self._half = False
                raise
        self._half = False

    @contextmanager
    def _attempt(self, lost: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.failed:
                logger.warning("%s: %s (%s: %s); training continues", self.path, lost, type(error).__name__, error)
            self.failed += 1


def _step(line: bytes) -> float:
    """The step of a whole line; infinite where it is none."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return float(json.loads(line)["step"])
    return math.inf
