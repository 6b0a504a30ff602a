"""The one timer: variants run in turn and are quoted as ratios; with the peak of memory, and a record of where and how it ran.

A variant is a function that does its work, on whatever host, and returns its seconds by stage.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "verl", "flash-attn", "numpy", "tokenizers")
CLOCKS = {"cpu": "processor time", "cuda": "wall clock"}


def now(device: str) -> float:
    """Seconds: on the CPU of this process's processor time, which other processes change much less than the wall clock; on a
    GPU of the wall clock, once the work before is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device: str, run: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = now(device)
    run()
    return now(device) - start


def in_turn(
    variants: Mapping[str, Callable[[], Result]], repeats: int | None = None, *, warm: bool = True
) -> Iterator[dict[str, Result]]:
    """Run every variant once a repeat, one after the other, each repeat starting with another one, so that load and drift fall
    on all alike; without ``repeats`` there is no end. One call of each comes first, whose result is dropped, unless ``warm`` is
    false."""
    for run in variants.values() if warm else ():
        run()
    names = list(variants)
    for repeat in itertools.count() if repeats is None else range(repeats):
        shift = repeat % len(names)
        yield {name: variants[name]() for name in names[shift:] + names[:shift]}
        show(f"repeat {repeat + 1} done")


def ratios(
    repeats: Sequence[Mapping[str, Any]], variant: str, baseline: str, total: Callable[[Any], float] = sum
) -> list[float]:
    """A variant's seconds as a multiple of the baseline's in the same repeat; ``total``: of what a variant returns."""
    return [total(repeat[variant]) / total(repeat[baseline]) for repeat in repeats]


def peak_memory(device: str, run: Callable[[], Any]) -> int:
    """Most bytes of tensors that torch holds on the device at any time of a call, with what it held before.

    On a GPU ``torch.cuda.max_memory_allocated``. On the CPU the same account from the profiler, which sees each allocation and
    each release of torch's allocator; memory that libraries take for themselves does not show in either.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    before = _live_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return before + max(itertools.accumulate((change for _, change in changes), initial=0))


def _live_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows, each once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def record(name: str, device: str, command: str) -> dict[str, Any]:
    """Where and how a benchmark ran; its figures are added to this."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "name": name,
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "hardware": _hardware(device),
        "versions": versions,
        "clock": CLOCKS[device],
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def write(result: dict[str, Any], folder: Path) -> None:
    """Save as ``<name>-<device>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}-{result['device']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(f"wrote {path}")


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _hardware(device: str) -> str:
    """The GPU, or the processor, with how much of it there is."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{(names or [platform.processor()])[0]}, {os.cpu_count()} cores"
