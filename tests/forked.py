"""Processes of tests that begin with everything imported: forks of one process, which imports torch, verl and vLLM once.

The imports take several times what most of these processes are started for; a whole verl run is a dozen of them. A fork is else
a process of its own: :func:`python` is an executable that takes a command as the interpreter does, and the fork has that
command's arguments, variables, folder and open files. What is read while something is imported (:data:`ENVIRONMENT`) is the
same for all of them; a test of the import itself, or that looks at a run's processes from outside, starts interpreters.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "tests" / "fork_client.py"
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
    "VLLM_LOGGING_LEVEL": "WARN",
    # Ray's core reads how it authenticates when it is loaded, before there is a cluster with a token.
    "RAY_AUTH_MODE": "disabled",
}


@cache
def python(*folders: Path) -> Path:
    """An executable that takes the place of the interpreter; the process behind it lives as long as this one.

    Args:
        folders: where packages lie that the forks import, too.

    Raises:
        RuntimeError: it ended before it was there.
    """
    folder = Path(tempfile.mkdtemp(prefix="fork"))  # a socket's path must be short
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, ready, log = folder / "socket", folder / "ready", folder / "log"
    # Ray's core reads these, too, when it is loaded. Of a run that starts its own Ray the job is the first one; and a worker
    # hears by its socket that its raylet is gone.
    rays = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}
    paths = os.pathsep.join(map(str, (ROOT, *folders)))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(address), str(ready)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **rays, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    while not ready.exists():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.1)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{CLIENT}" "{address}" "{path}" "$@"\n')
    path.chmod(0o755)
    return path


def start(
    module: str, *arguments: str, stdout: Path, stderr: Path | None = None, fork: bool = True, **environment: str | None
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``; its errors go to ``stdout``, too, unless a file for them is named.

    ``environment`` has further variables, None for one to be without. Without ``fork`` it is a new interpreter with the
    environment of this one: for a process that uses a GPU, or whose variables are read while something is imported.
    """
    variables: dict[str, str | None] = {**os.environ, **(ENVIRONMENT if fork else {}), **environment}
    with stdout.open("a") as out, (stderr or stdout).open("a") as err:
        return subprocess.Popen(
            [str(python()) if fork else sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def run(
    module: str, *arguments: str, timeout: float = 300, fork: bool = True, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(module, *arguments, stdout=stdout, stderr=stderr, fork=fork, **environment)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.output, error.stderr = stdout.read_bytes(), stderr.read_bytes()
            raise
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(
            [sys.executable, "-m", module, *arguments], process.returncode, stdout.read_text(), stderr.read_text()
        )
