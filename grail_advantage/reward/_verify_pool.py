"""A few child processes that compare answers with math-verify and are killed when one of them takes too long.

math-verify's own time-outs need the main thread (SIGALRM), while reward functions run in executor threads; and sympy can
hang inside one call into C, where no thread can stop it. So every comparison runs in a child process (``_verify_worker``)
with limits on processor time, wall time and memory, and without files, network and other processes where the kernel can take
these away (``_confine``). Each child is a fresh interpreter with its own pair of pipes: starting
one neither forks this process, which may hold torch, Ray and their threads, nor runs its main module again, and killing one
cannot leave a shared lock or queue broken.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

_WORKER_SCRIPT = Path(__file__).with_name("_verify_worker.py")
# Loading sympy takes less than a second of processor time; the rest allows for a machine that is busy starting Ray.
_START_SECONDS = 120.0
_MEMORY = 1 << 30
_RETIRE_AT = 384 << 20  # a fresh worker holds 60 MB
# The kernel ends a worker that used up its processor time. One that is merely starved by other work gets this many times
# that by the wall clock, so that verdicts do not depend on how busy the machine is.
_WALL_FACTOR = 10.0
# What a child gets of this process's environment, which may hold keys: what finds its libraries and sets up sympy.
_ENVIRONMENT = ("HOME", "PYTHON", "LD_", "LC_", "LANG", "SYMPY_", "MPMATH_")


class VerifyFailed(Exception):
    """No verdict: the comparison ran out of time or memory, or its process died. The message says which."""


class _WorkerLost(VerifyFailed):
    """The process went away for a reason outside the answer, for example a kill from outside."""


class _Worker:
    """One child process, started again whenever it is gone. Used by one thread at a time."""

    def __init__(self, cpu_seconds: float) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.confinement: list[str] = []
        """Layers of ``_confine`` that hold in the process that last got ready."""

    def start(self) -> None:
        """Start the process without waiting for it to be ready."""
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER_SCRIPT), str(self._cpu_seconds), str(_MEMORY), str(_RETIRE_AT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The order of sympy's terms follows hashes of strings, and a judge should not depend on it.
            env={name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
            | {"PYTHONHASHSEED": "0"},
        )

    def ask(self, request: bytes) -> bool:
        """Send one request line, return the verdict; raises ``VerifyFailed`` and leaves a fresh process behind it."""
        try:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self.start()
            if not self._ready:
                self.confinement = _said(json.loads(self._read_line(_START_SECONDS)))
                self._ready = True
            try:
                self._process.stdin.write(request)
            except BrokenPipeError:
                raise _WorkerLost("the worker was gone") from None
            reply = json.loads(self._read_line(self._cpu_seconds * _WALL_FACTOR))
        except BaseException:
            # Also on KeyboardInterrupt: the reply to this request must not be taken for the next one's.
            self.stop()
            self.start()
            raise
        if reply["last"]:
            self.stop()
            self.start()
        if "error" in reply:
            raise VerifyFailed(reply["error"])
        return reply["equal"]

    def _read_line(self, seconds: float) -> bytes:
        stdout = self._process.stdout
        poll = select.poll()  # unlike select(), it takes file descriptors above 1023
        poll.register(stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise VerifyFailed(f"no reply within {seconds:g} s")
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                code = self._process.wait()
                if code == -signal.SIGKILL:
                    raise _WorkerLost("the worker was killed from outside")
                if not self._ready:
                    # Not the answer's fault: it would turn every reward to 0, and is logged louder than a VerifyFailed.
                    raise RuntimeError(f"the worker did not start (exit status {code}); its error output says why")
                if code == -signal.SIGPROF:
                    raise VerifyFailed(f"more than {self._cpu_seconds:g} s of processor time")
                raise VerifyFailed(f"the worker ended with status {code}")
            line += chunk
        return line

    def stop(self) -> None:
        """Kill the process, collect its exit status and close its pipes."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def forget(self) -> None:
        """In a forked child: let go of the parent's process without touching it."""
        if self._process is not None:
            self._process.returncode = 0  # not this process's child, so there is nothing to collect
            self._close_pipes()  # or the worker would not see its parent's end of the pipe close

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        self._process = None


_missing_said = False


def _said(ready: dict[str, Any]) -> list[str]:
    """The layers that hold; those that do not are said once a process."""
    global _missing_said
    if ready["missing"] and not _missing_said:
        _missing_said = True
        reasons = ", ".join(f"no {layer} ({why})" for layer, why in ready["missing"].items())
        logger.warning(
            "reward: answers are compared behind fewer walls than the kernel could give: %s; %s hold. docs/hostile_input.md",
            reasons,
            ", ".join(ready["confined"]) or "none of them",
        )
    return ready["confined"]


class VerifyPool:
    """Compares answers in ``workers`` child processes; any number of threads may call it.

    Args:
        workers: how many processes, at least 1. All are started at once, about half a second of processor time each.
        cpu_seconds: processor time one comparison may take. The wall-clock limit is ten times that.
    """

    def __init__(self, workers: int, cpu_seconds: float) -> None:
        self._workers = [_Worker(cpu_seconds) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)

    def verify(self, gold: str, pred: str) -> bool:
        """Whether math-verify finds the two equal (both LaTeX, without a box); raises ``VerifyFailed`` for no verdict and
        RuntimeError where workers do not start."""
        request = json.dumps({"gold": gold, "pred": pred}).encode("ascii") + b"\n"
        worker = self._idle.get()
        try:
            try:
                return worker.ask(request)
            except _WorkerLost:
                return worker.ask(request)
        finally:
            self._idle.put(worker)

    def confinement(self) -> list[list[str]]:
        """Layers of ``_confine`` that hold, of each worker that has answered once."""
        return [worker.confinement for worker in self._workers if worker.confinement]

    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker._process.pid for worker in self._workers if worker._process is not None]

    def close(self) -> None:
        """Kill every worker. The pool must not be used afterwards."""
        for worker in self._workers:
            worker.stop()

    def forget(self) -> None:
        for worker in self._workers:
            worker.forget()


_pool: VerifyPool | None = None
_lock = threading.Lock()


def settings() -> tuple[int, float]:
    """Number of workers (``GRAIL_REWARD_WORKERS``, 2) and seconds for one answer (``GRAIL_REWARD_TIMEOUT``, 3).

    Raises:
        ValueError: a value that is no positive number.
    """
    values = []
    for name, default, kind in (("GRAIL_REWARD_WORKERS", "2", int), ("GRAIL_REWARD_TIMEOUT", "3", float)):
        text = os.environ.get(name, default)
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1000:
            raise ValueError(
                f"environment variable {name}={text!r}: set it to a positive number, or unset it ({default})"
            )
        values.append(value)
    return values[0], values[1]


def get_pool() -> VerifyPool:
    """This process's pool, started by the first call. A forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = VerifyPool(*settings())
        return _pool


def close_pool() -> None:
    """End this process's workers; the next ``get_pool`` starts new ones. Runs by itself when the interpreter exits."""
    global _pool
    with _lock:
        if _pool is not None:
            _pool.close()
            _pool = None


def _after_fork_in_child() -> None:
    global _pool, _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    if _pool is not None:
        _pool.forget()
        _pool = None


atexit.register(close_pool)
os.register_at_fork(after_in_child=_after_fork_in_child)
