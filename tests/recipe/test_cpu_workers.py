"""Forked workers: what Ray's raylet starts in place of Python is the process that it wanted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERVER = """
import sys
from verl_cpu.workers import server
server.WITHOUT_RAY, server.WITH_RAY = ("json.tool",), ("colorsys",)
server.main()
"""
SCRIPT = """
import json, os, sys
own = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "nice": os.nice(0), "folder": os.getcwd()}
own |= {"arguments": sys.argv, "name": __name__, "environment": dict(os.environ)}
print(json.dumps(own | {"preloaded": [name in sys.modules for name in ("json.tool", "colorsys")]}))
sys.stderr.write(sys.stdin.read())
"""
CLIENT = ROOT / "packages/verl-cpu/verl_cpu/workers/client.py"
NUMBERS = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A server that imports next to nothing."""
    folder = tmp_path / "socket's folder"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-c", SERVER, str(folder / "socket"), str(number)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, pass_fds=[number])
    yield process
    process.kill()
    process.wait()


def worker(server: subprocess.Popen, folder: Path, said: str = "", **environment: str) -> dict:
    """What a worker sees of itself; it must say on stderr what it was given on stdin."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    client = ["nice", "-n", "3", sys.executable, "-I", "-S", str(CLIENT), server.args[-2], str(script), "-x"]
    given: dict[str, Any] = {"env": environment, "cwd": folder, "input": said}
    done = subprocess.run(client, **given, capture_output=True, text=True, check=True)
    own = json.loads(done.stdout)
    assert (done.stderr, own["arguments"], own["name"]) == (said, [str(script), "-x"], "__main__")
    assert (own["folder"], own["nice"]) == (str(folder), min(os.nice(0) + 3, 19))
    assert {name: own["environment"].get(name) for name in environment} == environment
    return own


def test_a_worker_is_a_fork_with_the_environment_that_ray_gave_it(server: subprocess.Popen, tmp_path: Path) -> None:
    """Ray reads the job's number while it is imported: a fork for another job would take itself for the first one's."""
    workers = [worker(server, tmp_path, f"line {i}\n", NUMBER=str(i), **NUMBERS) for i in range(2)]
    for own in workers:
        assert own["parent"] == server.pid and own["group"] == own["pid"]
        assert own["preloaded"] == [True, True] and "HOME" not in own["environment"]
    assert workers[0]["pid"] != workers[1]["pid"]
    other = worker(server, tmp_path, **NUMBERS | {"RAY_JOB_ID": "02000000"})
    assert other["parent"] != server.pid and other["preloaded"] == [False, False]


def test_without_a_server_python_runs(server: subprocess.Popen, tmp_path: Path) -> None:
    """The server ends with the run's own process, and removes its folder."""
    server.stdin.close()
    assert server.wait(60) == 0 and not Path(server.args[-2]).parent.exists()
    assert worker(server, tmp_path, "said\n", **NUMBERS)["preloaded"] == [False, False]
