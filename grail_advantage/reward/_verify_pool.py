"""The process that compares answers with math-verify (``_verify_worker``) and the connections to it.

math-verify's time-outs need the main thread, while reward functions run in executor threads; and sympy can hang inside
one call into C. So comparisons run in processes that the kernel ends. A fresh interpreter forks them: starting it
neither forks this process, which may hold torch, Ray and their threads, nor runs its main module again.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue

_SCRIPT = Path(__file__).with_name("_verify_worker.py")
# The child gets of the environment, which may hold keys, only the variables that find its libraries and set up sympy.
_ENVIRONMENT = ("HOME", "PYTHON", "LD_", "LC_", "LANG", "SYMPY_", "MPMATH_")
_SECONDS_VARIABLE = "GRAIL_REWARD_TIMEOUT"
_WORKERS = 2
# The last resort, for a process that neither works nor ends: the limit is processor time, and a machine may be busy.
_PATIENCE_SECONDS = 600.0


class VerifyFailed(Exception):
    """No verdict, and why."""


class _Server:
    """The other process, with one connection for each worker; any number of threads may ask it."""

    def __init__(self) -> None:
        self._cpu_seconds = cpu_seconds()
        self.connections, other_ends = zip(*(Pipe() for _ in range(_WORKERS)), strict=True)
        descriptors = [end.fileno() for end in other_ends]
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(self._cpu_seconds), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            # The order of sympy's terms follows hashes of strings, and a verdict should not depend on it.
            env={**environment, "PYTHONHASHSEED": "0"},
        )
        self._idle: SimpleQueue = SimpleQueue()
        for connection, other_end in zip(self.connections, other_ends, strict=True):
            other_end.close()
            self._idle.put(connection)

    def ask(self, gold: str, answer: str) -> bool | str | None:
        """Returns the verdict, why there is none, or None where the process ended for a reason outside the answer."""
        connection = self._idle.get()
        verdict = None
        try:
            with suppress(EOFError, OSError):
                connection.send_bytes(json.dumps([gold, answer]).encode())
                if connection.poll(_PATIENCE_SECONDS + 20 * self._cpu_seconds):
                    verdict = json.loads(connection.recv_bytes())
        finally:  # also after KeyboardInterrupt: the reply must not be taken for the next one's
            if verdict in (None, "killed"):  # from outside; perhaps the other workers, too
                self.process.kill()
            self._idle.put(connection)
        if verdict not in (None, "killed"):
            return verdict
        # It would turn every reward to 0, and is logged louder
        if (status := self.process.wait()) > 0:
            raise RuntimeError(f"{_SCRIPT} ended with status {status}; its error output says why")
        return None


_server: _Server | None = None
_lock = threading.Lock()


def cpu_seconds() -> float:
    """Returns the seconds of processor time for one answer. Raises ValueError for no positive number."""
    text = os.environ.get(_SECONDS_VARIABLE, "3.0")
    value = 0.0
    with suppress(ValueError):
        value = float(text)
    if not 0 < value < 1000:
        raise ValueError(
            f"{_SECONDS_VARIABLE}={text!r}: set the variable to a positive number, or unset it (3.0)"
        )
    return value


def server() -> _Server:
    """This process's server; the first call starts it. A forked child gets its own."""
    global _server
    with _lock:
        if _server is None or _server.process.poll() is not None:
            _server = _Server()
        return _server


def verify(gold: str, answer: str) -> bool:
    """Returns whether math-verify finds the two equal (both LaTeX, without a box). Raises VerifyFailed for no verdict,
    and RuntimeError where the other process does not start."""
    if (verdict := server().ask(gold, answer)) is None:
        # Once more in a new server: the old one ended for a reason outside this answer.
        verdict = server().ask(gold, answer)
    if not isinstance(verdict, bool):
        raise VerifyFailed(verdict or "the process that compares the answers was killed twice")
    return verdict


def _after_fork_in_child() -> None:
    global _server, _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    if _server is not None:
        for connection in _server.connections:  # or the server would not see the parent's end close
            connection.close()
        _server.process.returncode = 0  # not this process's child
        _server = None


os.register_at_fork(after_in_child=_after_fork_in_child)
