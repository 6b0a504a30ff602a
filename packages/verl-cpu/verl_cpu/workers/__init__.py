"""Ray's workers as forks of one process that has imported torch, verl and vLLM, for runs without an accelerator.

Each of a run's ten processes would spend 10 to 20 s of processor time on the same imports. Ray runs ``client.py`` in
place of Python (``runtime_env.py_executable``), which asks the server (``server.py``) for a fork and stands for it
until it ends. Where no server answers, on another machine or after the run's end, it becomes the Python process that
Ray wanted.
"""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PY_EXECUTABLE = "ray_kwargs.ray_init.runtime_env.py_executable"
_server: subprocess.Popen | None = None
"""Reads its input, which nobody writes, and ends when that does: with this process, whatever ends it."""


def start(config: Any, modules: Sequence[str] = ()) -> None:
    """Have Ray's workers started by a server that also imports these modules, unless the configuration names an
    interpreter."""
    # The server imports this package, too, and must not import Ray with it.
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if OmegaConf.select(config, PY_EXECUTABLE) is not None:
        return
    verls = get_ppo_ray_runtime_env(config).get("env_vars", {})
    configured = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars", default={})
    # As Ray would start a worker: verl's variables, then those of the configuration.
    environment = {**os.environ, **verls, **configured}
    OmegaConf.update(config, PY_EXECUTABLE, serve(environment, modules), force_add=True)


def serve(environment: Mapping[str, str], modules: Sequence[str] = ()) -> str:
    """Start a server with these variables that also imports these modules; returns what Ray is to run in place of
    Python."""
    global _server
    address = Path(tempfile.mkdtemp(prefix="verl-cpu-workers-"), "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        number = listener.fileno()
        command = [sys.executable, "-m", "verl_cpu.workers.server", str(address), str(number)]
        _server = subprocess.Popen(
            [*command, *modules], stdin=subprocess.PIPE, env=environment, pass_fds=[number]
        )
    client = str(Path(__file__).with_name("client.py"))
    # -I -S: without site-packages, which the client does not need, it starts sooner.
    return shlex.join([sys.executable, "-I", "-S", client, str(address)])
