"""The process that Ray's workers are forks of: ``python -m verl_cpu.workers.server ADDRESS NUMBER [MODULE ...]``, with
the number of the open file that listens at the address, and further modules to import. It ends when its input does."""

import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Imports while the run is being checked and Ray starts, and at the first request: Ray reads variables while it is
# imported.
WITHOUT_RAY = (
    "datasets",
    "peft",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.entrypoints.openai.api_server",
)
WITH_RAY = (
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "verl_cpu.vllm",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.worker.cpu_worker",
)
NUMBERS = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Those that a worker must share with the first one."""


def preload(names: Sequence[str]) -> None:
    """Import modules. Nobody will look for garbage in what is there by then, nor does the collector meanwhile."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def serve(listener: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    """Answer requests by forks, until the end of the input; in the forks, this returns the request. A request from
    another job or another raylet than the first one's gets no answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            connection, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as stream:
                request = json.load(stream)
            numbers = {name: request["environment"].get(name, "") for name in NUMBERS}
            if not first:
                first = numbers
                variables = request["environment"].items()
                os.environ.update(
                    {name: value for name, value in variables if name.startswith("RAY_")}
                )
                preload([*WITH_RAY, *modules])
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
            # A fork has the first request's variables of Ray, which its modules read when they were imported.
            if numbers == first and os.fork() == 0:
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                connection.sendall(b".")
                connection.detach()  # open until the fork ends
                return request
            # The fork has its own copies of these.
            connection.close()
            for file in files:
                os.close(file)
    return None


def become(request: dict[str, Any]) -> None:
    """Run the requested script as the process that Ray's raylet would have started."""
    # The server ignores both, and a fork inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # a raylet ends the group of a worker that died, and no other's
    os.nice(request["nice"] - os.nice(0))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Python's own generator takes a new seed in every fork.
    importlib.import_module("numpy").random.seed()
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Imports modules and serves forks."""
    address = Path(sys.argv[1])
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        preload(WITHOUT_RAY)
        request = serve(listener, sys.argv[3:])
    if request is None:
        shutil.rmtree(address.parent)
    else:
        become(request)


if __name__ == "__main__":
    main()
