"""Modules as programs in processes of multiprocessing's fork server, which imports torch and verl once for all of them."""

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from tests.clone import ROOT

PRELOADED = (
    "peft torch transfer_queue transformers.models.llama transformers.models.qwen3 verl.trainer.main_ppo "
    "verl.workers.engine_workers grail_advantage.verl_ext.worker recipe.run_life.trainer"
)
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Variables of every process; some are read while verl is imported."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED.split())


def _become(
    module: str,
    arguments: tuple[str, ...],
    files: tuple[Path, Path],
    folder: Path,
    environment: dict[str, str],
):
    gc.freeze()  # no fork looks for garbage in the imports again, which took a quarter of the ranks' time
    for number, file in enumerate(files, start=1):
        with file.open("a") as stream:
            os.dup2(stream.fileno(), number)
    os.chdir(folder)
    os.environ.update(environment)  # those that the imports have set stay
    # Verl is imported already
    for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork(target: Callable[..., None], *arguments) -> BaseProcess:
    """Start a function of a module that the fork server can import."""
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    # The fork server starts with the first
    with patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}):
        process.start()
    return process


def start(
    module: str,
    *arguments: str,
    stdout: Path,
    stderr: Path | None = None,
    **environment: str,
) -> BaseProcess:
    """Start ``python -m module``, as far as a fork is one; its errors go to ``stdout``, too, unless a file is named."""
    variables = {**os.environ, **ENVIRONMENT, **environment}
    return fork(
        _become, module, arguments, (stdout, stderr or stdout), Path.cwd(), variables
    )


def run(
    module: str, *arguments: str, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        stdout = Path(folder, "stdout")
        stderr = Path(folder, "stderr")
        process = start(module, *arguments, stdout=stdout, stderr=stderr, **environment)
        process.join(timeout)
        status = process.exitcode
        process.kill()
        process.join()
        assert status is not None, (
            f"{module} runs after {timeout:.0f} s\n{stderr.read_text()}"
        )
        return subprocess.CompletedProcess(
            [module, *arguments], status, stdout.read_text(), stderr.read_text()
        )
