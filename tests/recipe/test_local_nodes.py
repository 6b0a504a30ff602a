"""scripts/local_nodes.sh without Ray: its status, names and variables, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "local_nodes.sh"
ENVIRONMENT = {**os.environ, "RAY": "0", "PYTHON": sys.executable}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def nodes() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a shell script on the first of two nodes; ``$on`` runs a command on the other."""
    done = run("2", "true")
    if "does not let" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return lambda script: run("2", "bash", "-c", f'on="bash {SCRIPT} on 2"\n{script}')


def test_status_name_folders_and_variables(nodes: Callable) -> None:
    done = nodes("""
        hostname; $on hostname; pwd; $on pwd
        echo here >/dev/shm/file; ls /dev/shm; $on ls /dev/shm; $on ls /tmp/ray
        echo "$RAY_ADDRESS $GLOO_SOCKET_IFNAME $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}"
        exit 7
    """)
    here = os.getcwd()
    assert done.returncode == 7
    assert done.stdout.split("\n")[:-1] == [
        "node1", "node2", here, here, "file", "10.77.0.1:6379 eth0 token 64",
    ]  # fmt: skip


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if mark in " ".join(process.info["cmdline"] or [])]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(nodes: Callable, tmp_path: Path, number: signal.Signals) -> None:
    """Of the command, nor of what runs on the other node, whether the script is asked or killed."""
    mark = f"{tmp_path}/mark"
    command = f'{sys.executable} -c \'import time; open("{mark}", "a").write("x"); time.sleep(60)\''
    script = f"bash {SCRIPT} on 2 {command} & {command}"
    # Tests that a shell started in the background ignore Ctrl-C, and what they start cannot choose otherwise.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(["bash", str(SCRIPT), "2", "bash", "-c", script], env=ENVIRONMENT, preexec_fn=listening)
    deadline = time.monotonic() + 30
    while not (Path(mark).exists() and Path(mark).read_text() == "xx"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    status = process.wait(timeout=30)
    assert status == {signal.SIGINT: 143, signal.SIGKILL: -9}[number]
    while _marked(mark):
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)


def test_refused() -> None:
    for arguments, environment, message in (
        ((), {}, "usage: bash scripts/local_nodes.sh NODES COMMAND...; NODES is 1 to 99"),
        (("two", "true"), {}, "NODES is 1 to 99"),
        (("2", "true"), {"SLOTS": "0"}, "SLOTS=0 must be a whole number from 1 on"),
        (("2", "true"), {"RAY": "yes"}, "RAY=yes must be 0 or 1"),
        (("2", "true"), {"PYTHON": "/no/python"}, "PYTHON=/no/python is no interpreter; run bash scripts/setup_cpu.sh"),
        (("cut", "2"), {}, "there is no node 2 here; cut works inside a command"),
    ):
        done = run(*arguments, **environment)
        assert done.returncode == 1 and message in done.stderr
