"""Tools that all benchmarks share: a clock, the peak of allocated memory, and a record of where and how it ran."""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "verl", "flash-attn", "numpy", "tokenizers")


class Clock:
    """Seconds of work.

    On a GPU: wall clock between two synchronisations. On the CPU: processor time of this process, which other processes change
    much less than the wall clock.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.name = "processor time" if device == "cpu" else "wall clock"

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.device == "cpu" else time.perf_counter()

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long one call takes."""
        start = self.now()
        run()
        return self.now() - start


def in_turn(ways: Mapping[str, Callable[[], Result]], *, warm: bool = True) -> Iterator[dict[str, Result]]:
    """Run every way once a repeat, one after the other, each repeat starting with another one, so that load and drift fall
    on all alike; without an end. One call of each comes first, whose result is dropped, unless ``warm`` is false."""
    for run in ways.values() if warm else ():
        run()
    names = list(ways)
    for repeat in itertools.count():
        shift = repeat % len(names)
        yield {name: ways[name]() for name in names[shift:] + names[:shift]}


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
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    held = peak = before
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _live_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows, each once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def record(name: str, clock: Clock, command: str) -> dict[str, Any]:
    """Where and how a benchmark ran; its figures are added to this."""
    return {
        "name": name,
        "device": clock.device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "hardware": _hardware(clock.device),
        "versions": {"Python": platform.python_version(), **_versions()},
        "clock": clock.name,
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Save as ``<name>-<device>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}-{result['device']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(f"wrote {path.name}")
    return path


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _hardware(device: str) -> str:
    """The GPU, or the processor, with how much of it there is."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names) or '?'} cores"
