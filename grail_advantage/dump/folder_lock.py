"""Locks of the folders that a process writes to (``flock``): a second process is refused, and a dead one leaves no lock."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".run.lock"
"""The file in a folder that a process has locked as long as it lives. The file stays."""
TRIES = 9
"""Of a folder that others move away between two calls."""
_held: dict[Path, int] = {}
"""The descriptors of this process's locks, by folder."""
_warned: list[str] = []


def hold(folder: Path, remedy: str, option: str | None = None) -> None:
    """Lock a folder until this process ends, in whatever way, or :func:`let_go`. It is made where it is missing; one that this
    process has locked stays so.

    No child inherits the lock, so that processes that a killed one leaves do not keep the next from the folder. Where it cannot
    be locked, as on some network file systems, a warning says so once.

    Args:
        folder: by any of its paths.
        remedy: how another one is chosen; the message has it after "or".
        option: that names it.

    Raises:
        ValueError: a process that lives has locked it.
    """
    folder = folder.resolve()
    named = f"{option}={folder}" if option else str(folder)
    problem: OSError | None = None
    for _ in range(TRIES):
        try:
            _lock(folder)
            return
        except FileNotFoundError as error:
            problem = error
        except BlockingIOError:
            who = (folder / LOCK).read_text(errors="replace").strip()
            raise ValueError(
                f"{named} belongs to a run that lives ({who}); wait for it or end it, and the same command resumes it, "
                f"or {remedy}"
            ) from None
        except OSError as error:
            problem = error
            break
    if not _warned:
        _warned.append(f"WARNING: {named} cannot be locked ({problem}); a second start would not be refused")
        print(_warned[0], file=sys.stderr, flush=True)


def adopt(folder: Path, lock: int) -> None:
    """Take over a lock of :data:`LOCK` that the script which started this process has taken, by its inherited descriptor."""
    os.set_inheritable(lock, False)
    _held[folder.resolve()] = lock


def let_go(folder: Path) -> None:
    """Unlock a folder, also one that has been moved since."""
    lock = _held.pop(folder.resolve(), None)
    if lock is not None:
        os.close(lock)


def _lock(folder: Path) -> None:
    """Raises FileNotFoundError where it was moved away meanwhile."""
    file = folder / LOCK
    if folder in _held and _is(_held[folder], file):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        raise OSError("this system has no flock")
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)  # closed by exec; NFS wants it writable
    except PermissionError:
        lock = os.open(file, os.O_RDONLY)  # of another user
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is(lock, file):
            raise FileNotFoundError(file)
    except OSError:
        os.close(lock)
        raise
    let_go(folder)
    _held[folder] = lock
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _is(lock: int, file: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock), file.stat())
    return False


def _forget() -> None:
    while _held:
        os.close(_held.popitem()[1])  # which does not unlock: the parent has it open


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget)
