"""Ranks as processes of their own: how a test starts them, and how a rank runs its experiments.

A ranks module names its experiments and ends with ``run_rank``; nothing is checked there, only measured. Every experiment's
result is saved, or its traceback.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests import forked

TIMEOUT = timedelta(seconds=300)
LONGEST = 1800.0
"""Seconds after which ranks are taken to hang."""
Results = dict[str, dict[str, Any]]


def start_ranks(module: str, folder: Path, world_size: int) -> list[Results]:
    """Run ``python -m module`` once a rank, wait, and return each rank's results by kind and name of experiment.

    The ranks are joined by gloo on the CPU.
    """
    processes = []
    for rank in range(world_size):
        arguments, log = list(map(str, (rank, world_size, folder))), folder / f"log{rank}.txt"
        processes.append(forked.start(module, *arguments, stdout=log))
    deadline = time.monotonic() + LONGEST
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    hang = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    files = [folder / f"result{rank}.pt" for rank in range(world_size)]
    if hang or not all(file.exists() for file in files):
        logs = "\n".join(f"{path.name}: ...{path.read_text()[-3000:]}" for path in sorted(folder.glob("log*.txt")))
        raise AssertionError(f"the ranks {'hang' if hang else 'did not start'}\n{logs}")
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def of_all_ranks(results: list[Results], kind: str, name: str) -> list[Any]:
    """One experiment's results of all ranks; fails with the traceback of a rank that raised."""
    found = [result.get(kind, {}).get(name, "the rank did not come this far") for result in results]
    for result in found:
        if isinstance(result, str):
            raise AssertionError(result)
    return found


def run_rank(
    make: Callable[[int, int, Path], Any], experiments: dict[str, dict[str, Any]], arguments: list[str]
) -> None:
    """Run a rank's experiments and save their results as ``result<rank>.pt`` in the folder.

    Args:
        make: called with rank, world size and folder; its methods are the kinds of experiment.
        experiments: by kind and name, the argument of the method of that kind.
        arguments: rank, world size, folder.
    """
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device

    rank, world_size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    made = make(rank, world_size, folder)
    results: Results = {}
    for kind, setups in experiments.items():
        results[kind] = {}
        for name, setup in setups.items():
            print(f"{kind}: {name}, after {time.process_time():.1f} CPU seconds", flush=True)
            try:
                results[kind][name] = getattr(made, kind)(setup)
            except Exception:
                results[kind][name] = traceback.format_exc()
                print(results[kind][name], flush=True)
                if world_size > 1:  # the others wait for a counterpart, and fail when this one is gone
                    torch.save(results, folder / f"result{rank}.pt")
                    os._exit(1)
            gc.collect()
    torch.save(results, folder / f"result{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
