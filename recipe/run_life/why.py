"""Why a command ended, as the last line that it says. Needs no verl, and writes to no disk.

Ray brings an error of another process as text, with that process's stack; torch says that a disk is full with a position in a
file, and no error number. So the whole chain of an error is read, with its texts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LAST_LINE = "RUN_LIFE_LAST_LINE_FD"
"""Environment name: a descriptor that gets the line as well, where the output goes to a log."""
LITTLE = 16 << 20
"""Bytes; a disk with less of them free counts as full where an error of torch's names no cause."""
_NOISE = re.compile(
    r"\x1b\[[0-9;]*m|Some common causes include.*|This file can still be loaded[\s\S]*?(?=WeightsUnpickler)"
)
"""Colours, Ray's list of what may have happened, and torch's advice in front of what it could not load."""
_OF_CODE = (ValueError, TypeError, LookupError, ImportError, AttributeError, NameError, AssertionError)
"""Errors that may quote any text, such as an option's value: their words name no cause."""
_NO_SPACE = re.compile(r"No space left on device|\(os error 28\)|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")
_TORCH_WRITES = re.compile(r"inline_container.*unexpected pos|PytorchStreamWriter|basic_ios::clear: iostream error")
_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|low on memory|memory usage threshold|Cannot allocate memory|bad_alloc|MemoryError",
    re.I,
)
_DAMAGED = re.compile(
    r"failed finding central directory|archive is corrupted|BadZipFile|deserializing header|MetadataIncompleteBuffer"
    r"|incomplete metadata"
)
_SIGNAL = re.compile(r"killed by signal (\d+)|SIG(KILL|SEGV|ABRT|BUS|TERM)\b|exit(?:ed)? (?:status|code) -(\d+)")
_DIED = re.compile(
    r"ActorDiedError|WorkerCrashed|worker process has died|unexpectedly exit|EngineDeadError|LocalRayletDied|^\s+died\s",
    re.M,
)
_UNREACHABLE = re.compile(
    r"Connection ?(?:refused|reset|timed out)|ConnectionError|NetworkUnreachable|Network is unreachable|No route to host"
    r"|Name or service not known|Temporary failure in name resolution|couldn't connect to|Max retries exceeded"
)


def why(error: BaseException, folders: Sequence[Path | str] = ()) -> str:
    """One sentence on the cause of an error, with the remedy.

    Args:
        error: with those that it came from.
        folders: which the command writes to, whose disks may be full.
    """
    chain = list(_chain(error))
    told = (each for each in chain if isinstance(each, OSError) or not isinstance(each, _OF_CODE))
    text = "\n".join(_NOISE.sub("", f"{type(each).__name__}: {each}") for each in told)
    named = next(
        (each for each in chain if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT)), None
    )
    torchs = _TORCH_WRITES.search(text)
    full = next((folder for folder in map(Path, folders) if _free(folder) < LITTLE), None)
    if named is not None or _NO_SPACE.search(text) or (torchs and full is not None):
        found = re.search(r"(?:No space left on device|Disk quota exceeded)[^\n']*: '([^'\n]+)'", text)
        at = found[1] if found else getattr(named, "filename", None) or full
        where = f" at {at}" if at else ""
        remedy = "free some, or name a folder on another one, and give the same command again"
        return f"no space is left on the disk{where}; {remedy}"
    if torchs:
        cause = "full disk, quota, or a file system that went away"
        return f"a checkpoint could not be written ({cause}); mend that, and give the same command again"
    if _MEMORY.search(text):
        return f"out of memory ({_line(_MEMORY, text)}); give it more, or smaller batches: docs/troubleshooting.md, The run"
    if (killed := _SIGNAL.search(text)) and _DIED.search(text):
        name = f"SIG{killed[2]}" if killed[2] else _signal(int(killed[1] or killed[3]))
        return f"{_who(text)} was killed by {name}; where nobody did it, memory ran out: give the same command again with more"
    if _DIED.search(text):
        return (
            f"{_who(text)} died without a word, as by SIGKILL (signal 9), which the system sends where memory runs out; give "
            "the same command again, with more memory if nobody killed it"
        )
    if _DAMAGED.search(text):
        path = re.search(r"(/[^\s'\":]+\.(?:pt|safetensors|parquet))", text)
        return (
            f"a file is cut off or damaged ({path[1] if path else _line(_DAMAGED, text)}); remove its checkpoint, and the same "
            "command resumes from the one before, or fetch the file again"
        )
    if _UNREACHABLE.search(text):
        return f"a machine or a server cannot be reached ({_line(_UNREACHABLE, text)}); give the same command again when it can"
    if "timed out during startup" in text:
        return (
            "Ray's own processes did not start within 30 s, as on a machine that is busy; give the same command again"
        )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C); the same command resumes from the last checkpoint"
    root = _root(chain)
    said = " ".join(_NOISE.sub("", str(root)).split())
    named = "" if said and isinstance(root, ValueError | RuntimeError | OSError) else type(root).__name__
    return ": ".join(filter(None, (named, said[:600])))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [getattr(each, "cause", None), each.__cause__, each.__context__]
            waiting += list(getattr(each, "exceptions", ()))


def _root(chain: Sequence[BaseException]) -> BaseException:
    """The error that says most: the first one that is no exit; of Ray's, the one in the other process."""
    first = next((each for each in chain if not isinstance(each, SystemExit)), chain[0])
    cause = getattr(first, "cause", None)
    return cause if isinstance(cause, BaseException) else first


def _line(pattern: re.Pattern[str], text: str) -> str:
    """The line with the first match, shortened around it."""
    found = pattern.search(text)
    begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    line = text[begin : end if end >= 0 else None].strip()
    at = max(0, found.start() - begin - 80)
    return line[at : at + 160]


def _who(text: str) -> str:
    """The process that died, as the watch or Ray names it."""
    of_watch = re.search(r"^\s*died\s+(.+)$", text, flags=re.M)
    of_ray = re.search(r"class_name: (\S+)[\s\S]{0,200}?pid: (\d+)", text)
    return (
        of_watch[1].strip() if of_watch else f"{of_ray[1]}, process {of_ray[2]}," if of_ray else "a process of the run"
    )


def _signal(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _free(folder: Path) -> float:
    for place in (folder, *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return float("inf")


class _Said(SystemExit):
    """An exit whose cause is said."""


@contextmanager
def last_line(command: str, folders: Sequence[Path | str] = ()) -> Iterator[None]:
    """Within, an error or an exit with another status than 0 is the process's last line, on stderr and on the descriptor that
    :data:`LAST_LINE` names, whatever becomes of the rest. The status is 1 where the error had none.

    Args:
        command: in front of the line.
        folders: which it writes to.
    """
    try:
        yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if status in (0, None) or isinstance(error, _Said):
            raise
        with suppress(Exception):
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
        with suppress(Exception):  # its own lines come before
            ray = sys.modules.get("ray")
            if ray is not None and ray.is_initialized():
                ray.shutdown()
        # A text is the whole cause; an exit that hides an error is explained by that.
        _say(status if isinstance(status, str) else f"{command} ended: {why(error, folders)}")
        with suppress(Exception):
            sys.stdout.flush()
        raise _Said(status if isinstance(status, int) else 1) from None


def _say(text: str) -> None:
    given = os.environ.get(LAST_LINE, "")
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
    with suppress(OSError, ValueError):
        os.write(int(given), " ".join(text.split()).encode(errors="replace")[:4000] + b"\n")
