"""Processes of tests that begin with everything imported: forks of one process, which imports torch and verl once.

The imports take several times what most of these processes are started for. A fork is else a process of its own: it runs a
module as ``python -m`` does, with its own arguments, variables and output. What is read while verl is imported (``ENVIRONMENT``
for one) is the same for all of them; a test of the import itself, or of a whole run, starts an interpreter of its own.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}
IMPORTED = "tests.imported"

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload([IMPORTED])


def start(
    module: str, *arguments: str, stdout: Path, stderr: Path | None = None, fork: bool = True, **environment: str | None
) -> BaseProcess:
    """Start ``python -m module``; its errors go to ``stdout``, too, unless a file for them is named.

    ``environment`` has further variables, None for one to be without. Without ``fork`` it is a new interpreter with the
    environment of this one: for a process that uses a GPU, or whose variables are read while something is imported.
    """
    if fork:
        _begin()
    context = _FORKS if fork else get_context("spawn")
    process = context.Process(target=_run, args=(module, arguments, stdout, stderr or stdout, environment))
    process.start()
    return process


@cache
def _begin() -> None:
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()


def run(
    module: str, *arguments: str, timeout: float = 300, fork: bool = True, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(module, *arguments, stdout=stdout, stderr=stderr, fork=fork, **environment)
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired([module, *arguments], timeout, stdout.read_text(), stderr.read_text())
        finally:
            process.kill()
            process.join()
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.CompletedProcess(command, process.exitcode, stdout.read_text(), stderr.read_text())


def _run(
    module: str, arguments: tuple[str, ...], stdout: Path, stderr: Path, environment: dict[str, str | None]
) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for path, stream in ((stdout, 1), (stderr, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
