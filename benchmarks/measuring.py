"""Tools that all benchmarks share: a clock, the peak of allocated memory, and a record of where and how it ran."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "verl", "flash-attn", "numpy", "tokenizers")


class Clock:
    """Seconds of work.

    On a GPU: wall clock between two synchronisations. On the CPU with one thread: processor time of this process, which other
    processes change much less than the wall clock; with more threads the wall clock.
    """

    def __init__(self, device: str, threads: int = 1) -> None:
        self.device = device
        self.name = "processor time" if device == "cpu" and threads == 1 else "wall clock"

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.name == "processor time" else time.perf_counter()

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long one call takes."""
        start = self.now()
        run()
        return self.now() - start


def interleaved(clock: Clock, ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time every way once a repeat, one after the other, each repeat starting with another one; so load and drift fall on all
    alike. One untimed call of each comes first."""
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(clock.seconds(ways[name]))
    return seconds


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


def record(name: str, device: str, clock: Clock, threads: int) -> dict[str, Any]:
    """Where and how a benchmark ran; its figures are added to this."""
    return {
        "name": name,
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"python {shlex.join([_relative(sys.argv[0]), *sys.argv[1:]])}",
        "hardware": _hardware(device, threads),
        "versions": {"Python": platform.python_version(), **_versions()},
        "clock": clock.name,
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Save as ``<name>-<device>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}-{result['device']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(f"wrote {_relative(str(path))}")
    return path


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def selected_rows(share: float, rows: int) -> int:
    """The number of rows nearest to a share of them, at least one."""
    return max(1, round(share * rows))


def median(values: list[float]) -> float:
    return statistics.median(values)


def _relative(path: str) -> str:
    root = Path(__file__).parents[1]
    resolved = Path(path).resolve()
    return str(resolved.relative_to(root)) if resolved.is_relative_to(root) else resolved.name


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _hardware(device: str, threads: int) -> str:
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        return (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {driver}, CUDA {torch.version.cuda}"
        )
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''} used"


def said_by(*command: str) -> str:
    """The output of a command in the project's folder; nothing where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def processor() -> str:
    """The processor's name and core count."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names) or '?'} cores"
