"""The process behind ``tests/forked.py``: imports, then forks for whoever asks by ``tests/fork_client.py``.

python -m tests.fork_server SOCKET READY
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FLAGS = "BEIOSsu"
"""Options of the interpreter without a value, which a command may have."""


def main() -> None:
    """Import, listen, say so, and fork until the process that started this one is gone."""
    address, ready = map(Path, sys.argv[1:])
    given = dict(os.environ)
    import tests.imported  # noqa: F401

    own = {name: value for name, value in os.environ.items() if name not in given}
    # What is imported stays: no fork looks for garbage in it again, which took a quarter of the ranks' time.
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(64)
        ready.touch()
        _serve(server, own, os.getppid())


def _serve(server: socket.socket, own: dict[str, str], parent: int) -> None:
    """Fork for each connection. ``own`` are variables that the imports have set."""
    events = selectors.DefaultSelector()
    events.register(server, selectors.EVENT_READ)
    while os.getppid() == parent:
        for key, _ in events.select(timeout=5):
            if key.fileobj is server:
                _fork(server, events, own)
                continue
            pid, process, connection = key.data
            if connection.fileno() == -1:  # both had something to say, and the other was heard first
                continue
            if key.fileobj is connection:  # who asked is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                events.unregister(connection)
                continue
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                connection.sendall(code.to_bytes(4, "little", signed=True))
            with contextlib.suppress(KeyError):
                events.unregister(connection)
            events.unregister(process)
            connection.close()
            os.close(process)


def _fork(server: socket.socket, events: selectors.BaseSelector, own: dict[str, str]) -> None:
    connection, _ = server.accept()
    length, handed, _, _ = socket.recv_fds(connection, 8, 253)
    size = int.from_bytes(length, "little")
    received = connection.recv(size, socket.MSG_WAITALL)
    if len(received) < size:  # who asked is gone
        connection.close()
        for number in handed:
            os.close(number)
        return
    pid = os.fork()
    if pid:
        for number in handed:
            os.close(number)
        process = os.pidfd_open(pid)
        for file in (process, connection):
            events.register(file, selectors.EVENT_READ, (pid, process, connection))
        return
    others = [key.data[1:] for key in events.get_map().values() if key.data]
    events.close()
    server.close()
    connection.close()
    for process, other in others:
        with contextlib.suppress(OSError):
            os.close(process)
        other.close()
    _become(json.loads(received), handed, own)


def _become(request: dict[str, Any], handed: list[int], own: dict[str, str]) -> None:
    """Be the process that was asked for, from here to the end."""
    import torch

    # First out of the way of the numbers that are wanted, then to these.
    above = max([*request["numbers"], *handed]) + 1
    moved = []
    for number in handed:
        moved.append(fcntl.fcntl(number, fcntl.F_DUPFD, above))
        os.close(number)
    for number, wanted in zip(moved, request["numbers"], strict=True):
        os.dup2(number, wanted, inheritable=True)
        os.close(number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**own, **request["environment"]})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    multiprocessing.set_executable(request["python"])  # what it spawns is a fork, too
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry and entry not in sys.path]

    arguments = list(request["arguments"])
    while arguments and arguments[0][:1] == "-" and set(arguments[0][1:]) <= set(FLAGS):
        del arguments[0]
    kind = arguments[0]
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], sys.modules["__main__"].__dict__)
    elif kind == "-m":
        sys.path.insert(0, request["folder"])
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
