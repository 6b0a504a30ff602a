"""Several vLLM engines beside each other: one a GPU, or one a group of GPUs with tensor parallelism.

Every engine lives in a process of its own that sees its GPUs alone, and samples its share of the problems. The seed of a
sample does not depend on the share (:func:`recipe.evaluate.generation.sample_seed`), so the number of engines changes the
results no more than the order of the problems does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from recipe.evaluate.generation import Answer, Request, Sampling, generate, runs_on_cpu, start_engine

_DEVICES = "CUDA_VISIBLE_DEVICES"
_SECONDS_TO_END = 30


def engine_devices(workers: int | None, tensor_parallel_size: int) -> list[str | None]:
    """The GPUs that each engine sees, as a value of ``CUDA_VISIBLE_DEVICES``; ``None`` with vLLM's CPU build.

    Args:
        workers: number of engines, at least 1; ``None``: as many as the GPUs in sight allow, on a CPU one.
        tensor_parallel_size: GPUs of each engine, at least 1.

    Raises:
        ValueError: they ask for more GPUs than there are.
    """
    if runs_on_cpu():
        return [None] * (workers or 1)
    gpus = _visible_gpus()
    engines = len(gpus) // tensor_parallel_size if workers is None else workers
    if engines * tensor_parallel_size > len(gpus) or not engines:
        raise ValueError(
            f"--workers {workers or 1} x --tensor-parallel-size {tensor_parallel_size} needs "
            f"{(workers or 1) * tensor_parallel_size} GPUs, in sight are {len(gpus)}; lower one of them"
        )
    return [
        ",".join(gpus[first : first + tensor_parallel_size])
        for first in range(0, engines * tensor_parallel_size, tensor_parallel_size)
    ]


def _visible_gpus() -> list[str]:
    """Names of the visible GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get(_DEVICES)
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]


def share_out(requests: Sequence[Request], workers: int) -> list[list[Request]]:
    """Every ``workers``-th problem to the same engine, so that each gets its part of every benchmark; no empty share."""
    return [list(requests[first::workers]) for first in range(min(workers, len(requests)))]


def sample(
    model: Path,
    requests: Sequence[Request],
    sampling: Sampling,
    longest: int,
    *,
    devices: Sequence[str | None],
    tensor_parallel_size: int = 1,
) -> Iterator[tuple[Request, list[Answer]]]:
    """Sample problems with one engine for each of ``devices``; yields each problem as soon as its samples are there.

    Args:
        model: Hugging Face folder.
        requests: the problems.
        sampling: how responses are drawn.
        longest: tokens of the longest prompt and of a response together.
        devices: from :func:`engine_devices`.
        tensor_parallel_size: GPUs of each engine.

    Raises:
        RuntimeError: an engine failed; the others are stopped.
    """
    spawn = multiprocessing.get_context("spawn")
    workers: dict[Connection, tuple[BaseProcess, str]] = {}
    try:
        for number, share in enumerate(share_out(requests, len(devices))):
            device = devices[number]
            receiver, sender = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_work,
                args=(sender, model, share, sampling, longest, tensor_parallel_size),
                name=f"engine {number}",
            )
            with _environment(_DEVICES, device):
                process.start()
            sender.close()  # so that the pipe ends with the process
            where = f"engine {number}" if device is None else f"engine {number} on GPU {device}"
            workers[receiver] = process, where
        while workers:
            for receiver in wait(list(workers)):
                process, where = workers[receiver]
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(
                        f"{where} ended with status {process.exitcode}; its output above says why. Finished problems are "
                        "kept: the same command resumes here"
                    ) from None
                if kind == "answers":
                    yield content
                elif kind == "done":
                    del workers[receiver]
                    process.join()
                else:
                    raise RuntimeError(f"{where} failed: {content}")
    finally:
        for process, _ in workers.values():
            process.terminate()
        for process, _ in workers.values():
            process.join(_SECONDS_TO_END)
            if process.is_alive():
                process.kill()
                process.join()


def _work(
    sender: Connection,
    model: Path,
    requests: list[Request],
    sampling: Sampling,
    longest: int,
    tensor_parallel_size: int,
) -> None:
    """One engine's process."""
    # vLLM's own processes end with an ordinary exit, and would outlive this one otherwise.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        llm = start_engine(model, longest, tensor_parallel_size=tensor_parallel_size)
        for answered in generate(llm, requests, sampling):
            sender.send(("answers", answered))
        sender.send(("done", None))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)  # the evaluation was stopped
    except Exception as error:
        traceback.print_exc()
        sender.send(("failed", f"{type(error).__name__}: {error}"))


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """A variable set for the processes that start meanwhile; ``None`` leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
