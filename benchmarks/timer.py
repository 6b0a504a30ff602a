"""The one timer: variants run in turn and are quoted as ratios; with the peak of memory, and where and how it ran."""

import gc
import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from grail_advantage import text_io

Table = Mapping[str, Mapping[str, Any]]
"""Figures by row and column."""
PACKAGES = ("torch", "transformers", "verl", "trl", "flash-attn", "numpy")


def now(device: str) -> float:
    """Seconds: on the CPU of this process's processor time, which other processes change much less than the wall clock;
    on a GPU of the wall clock, once the work before is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device: str, run: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = now(device)
    run()
    return now(device) - start


def in_turn(variants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """Run every variant once a repeat, one after the other, each repeat starting with another one, so that load and
    drift fall on all alike. One call of each comes first, whose result is dropped. Returns each variant's results."""
    names = list(variants)
    results = {name: [] for name in names}
    for repeat in range(-1, repeats):
        # Of a, b and c the repeats are abc (dropped), abc, bca, cab.
        shift = max(0, repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(variants[name]())
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr, flush=True)
    return {name: of_variant[1:] for name, of_variant in results.items()}


def table(rows: Table) -> list[str]:
    """Lines of a Markdown table: by row and column a number, a text, or several numbers, of which it has the median, the
    lowest and the highest."""
    columns = list(dict.fromkeys(itertools.chain(*rows.values())))
    lines = []
    for label, figures in rows.items():
        lines.append([label, *(cell(figures.get(column, "")) for column in columns)])
    return text_io.table(["", *columns], lines, right=1)


def cell(value: Any) -> str:
    if isinstance(value, list):
        if len(value) > 1:
            return f"{cell(median(value))} ({cell(min(value))} to {cell(max(value))})"
        value = value[0]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def peak_memory(device: str, run: Callable[[], Any]) -> int:
    """Most bytes that torch's allocator holds on a GPU at any time of a call, with what it held before; on the CPU what
    the call adds to that, by the profiler. Memory that libraries take for themselves shows in neither."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = (
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def origin(device: str, command: str) -> str:
    """Where, when and how something ran, in a line."""
    versions = f"Python {platform.python_version()}"
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions += f", {package} {version(package)}"
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        hardware = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        cpu_info = Path("/proc/cpuinfo")
        name = re.search("model name.*: (.*)", cpu_info.read_text() if cpu_info.exists() else "")
        hardware = f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    return f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. {hardware}. {versions}."
