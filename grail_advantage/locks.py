"""The lock of a folder that a run writes to, so that no second run writes there while it lives."""

from __future__ import annotations

import logging
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)
LOCK = ".run.lock"  # the file in a folder that a living run has locked; it stays
_held: dict[Path, FileLock] = {}


def hold(folder: Path, remedy: str, option: str) -> None:
    """Lock a folder, which ``option`` names and which is made where it is missing, until this process ends or
    :func:`let_go`. Where it cannot be locked, as on some network file systems, a warning says so.

    Raises:
        ValueError: a process that lives has locked it; the message ends in ``remedy``.
    """
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _held.setdefault(folder, FileLock(folder / LOCK, thread_local=False))
        if not lock.is_locked:
            lock.acquire(blocking=False)
    except Timeout:
        wait = "wait for it or end it, and the same command resumes it"
        raise ValueError(f"{option}={folder} belongs to a run that lives; {wait}, or {remedy}") from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s); a second start would not be refused", folder, error)


def let_go(folder: Path) -> None:
    """Unlock a folder."""
    if (lock := _held.pop(folder.resolve(), None)) is not None:
        lock.release()
