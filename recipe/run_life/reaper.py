"""Leaves no process of a run behind: a small process beside the driver, run as a file, with the standard library alone.

Every process of a run carries the run's tag in the environment that it was started with: Ray's servers, its workers, vLLM's
engines, the reward's children. Ray ends most of them when the driver is gone, but not those that they started: an engine, a
resource tracker. So this process waits for the driver's end, however that comes about, gives the others a moment, and kills
those that are left. It has a session of its own, where no Ctrl-C reaches it.

It also ends the driver: when the process ``GRAIL_ADVANTAGE_ENDS_WITH`` is gone, such as the script that started the run; and
when the driver has said that it ends, and does not.

The tag is made of this machine, the driver's process id and the time at which that started, so another run of the same user is
never taken for this one, nor a live one for what a dead one left (:func:`leftovers`). Linux only, as Ray's own ways are here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

VARIABLE = "GRAIL_ADVANTAGE_RUN"
"""Environment variable with the run's tag."""
OWNER_VARIABLE = "GRAIL_ADVANTAGE_ENDS_WITH"
"""Environment variable with the id of a process: the run ends when that has ended."""
ENDING = b"ending\n"
"""What the driver says when it ends."""
PROC = Path("/proc")

TICK = 0.5
GRACE = 5.0
"""Seconds that processes get to end by themselves after the driver."""
KILLING = 20.0
"""Seconds that killed processes get to disappear."""
OWNERLESS = 30.0
"""Seconds that the driver gets to end by SIGTERM when its owner is gone."""
EXIT = 120.0
"""Seconds that the driver gets from saying that it ends."""


class Found(NamedTuple):
    """A process of a run."""

    pid: int
    title: str
    seconds: float
    """Since it was started."""


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; ``None`` where there is none, or nothing but its exit status."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def machine() -> str:
    """This machine, and the set of process ids that is seen from here."""
    boot = names = ""
    with contextlib.suppress(OSError):  # some sandboxes have neither
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink(PROC / "self/ns/pid").strip("pid:[]")
    return f"{boot}.{names}"


def tag_of(pid: int) -> str:
    """The tag of the run that this process drives."""
    return f"{machine()}/{pid}/{start_time(pid)}"


def _tagged() -> list[tuple[int, str]]:
    """Process ids and tags of all processes that carry one, and that may be looked at."""
    found = []
    name = f"{VARIABLE}=".encode()
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        tags = [variable.removeprefix(name) for variable in variables if variable.startswith(name)]
        if tags and start_time(int(entry.name)) is not None:
            found.append((int(entry.name), tags[0].decode(errors="replace")))
    return sorted(found)


def processes(tag: str) -> list[int]:
    """The ids of a run's processes; the driver, which makes the tag, is none of them."""
    return [pid for pid, other in _tagged() if other == tag]


def describe(pid: int, length: int | None = 80) -> Found:
    """What a process calls itself, cut off at a length, and its age."""
    try:
        title = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        title = ""
    uptime = float((PROC / "uptime").read_text().split()[0])
    started = (start_time(pid) or 0) / os.sysconf("SC_CLK_TCK")
    return Found(pid, title[:length] or "?", max(0.0, uptime - started))


def leftovers() -> dict[int, list[Found]]:
    """What runs on this machine have left behind, by the process id of their driver, which is gone."""
    found: dict[int, list[Found]] = {}
    here = machine()
    for pid, tag in _tagged():
        where, _, driver = tag.partition("/")
        driver_pid, _, started = driver.partition("/")
        if where == here and driver_pid.isdigit() and str(start_time(int(driver_pid))) != started:
            found.setdefault(int(driver_pid), []).append(describe(pid))
    return found


def say(text: str) -> None:
    """To the user, who may have closed the terminal or the pipe; what is to be done is done all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal, to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def await_none(tag: str, seconds: float, act: Callable[[int], None] | None = None) -> list[int]:
    """Wait until no process of the run is left, doing something to each that is; returns those that are left at the end."""
    deadline = time.monotonic() + seconds
    while (left := processes(tag)) and time.monotonic() < deadline:
        for pid in left if act is not None else ():
            act(pid)
        time.sleep(TICK)
    return left


def await_end(driver: int, started: int, owner: int | None) -> bool:
    """Wait until the driver has ended, and see to it that it does; whether it had said so."""
    owner_started = start_time(owner) if owner is not None else None
    said: float | None = None
    orphaned: float | None = None
    ears = [sys.stdin.fileno()]
    while start_time(driver) == started:
        heard, _, _ = select.select(ears, [], [], TICK)
        if heard:
            words = os.read(ears[0], 64)
            if ENDING in words:
                said = time.monotonic()
            if not words:  # the driver's end is closed; what remains is to see it go
                ears = []
        now = time.monotonic()
        if owner is not None and orphaned is None and (owner_started is None or start_time(owner) != owner_started):
            orphaned = now
            say(f"grail_advantage: process {owner}, which this run ends with, is gone")
            if said is None:
                kill(driver, signal.SIGTERM)
        if (orphaned is not None and now - orphaned > OWNERLESS) or (said is not None and now - said > EXIT):
            kill(driver)
    return said is not None


def main(driver: int, started: int, tag: str, owner: int | None) -> None:
    """Wait for the driver's end and end what it leaves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = await_end(driver, started, owner)
    if not said:
        say(
            f"grail_advantage: the driver of this run, process {driver}, was killed or crashed; what it leaves is ended now"
        )
    if not await_none(tag, GRACE):
        return
    left = await_none(tag, KILLING, act=kill)
    if left:
        say(f"grail_advantage: these processes of the run could not be ended: {left}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if sys.argv[4] else None)
