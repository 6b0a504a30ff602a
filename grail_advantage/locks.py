"""A run locks the folder that it writes to, so that no second run writes there while it lives."""

import logging
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

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
    # A second lock of the same process would be refused like that of another run.
    if folder in _held:
        return
    # Of the process: by default each thread has a lock of its own.
    lock = FileLock(folder / LOCK, thread_local=False)
    error: Exception | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except (Timeout, OSError, NotImplementedError) as raised:
        error = raised
    if isinstance(lock, SoftFileLock):
        # What filelock becomes where there is no flock: a file that outlives a killed process, of which no other node
        # can say whether it lives.
        lock.release(force=True)
        error = OSError(
            f"its file system has no flock; remove {folder / LOCK} if that is in the way"
        )
    elif isinstance(error, Timeout):
        wait = "wait for it or end it, and the same command resumes it"
        raise ValueError(f"{option}={folder} belongs to a run that lives; {wait}, or {remedy}")
    if error is None:
        _held[folder] = lock
    else:
        logger.warning(
            "%s cannot be locked (%s); a second start would not be refused", folder, error
        )


def let_go(folder: Path) -> None:
    """Unlock a folder."""
    if (lock := _held.pop(folder.resolve(), None)) is not None:
        lock.release()
