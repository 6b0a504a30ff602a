"""Writing a file so that it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".writing"
"""End of the name of a file that is being written."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Within, a file to write bytes to; afterwards it is at ``path``, whole and on the disk, in place of one that was there.
    Makes its folder; where writing fails, nothing is left.

    Raises:
        OSError: the disk's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link that somebody put there
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # puts the renaming itself on the disk
    finally:
        os.close(folder)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file, a text as UTF-8, through :func:`whole_file`."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
