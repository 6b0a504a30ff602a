"""Stand-in for ``torch.cuda`` in verl's CPU platform.

verl reaches its device through ``get_torch_device()`` and calls it with ``torch.cuda``'s names. ``torch.cpu`` has the
names that deal with streams and synchronisation; this module adds the rest. Memory is the host's: what this process
holds counts as allocated, in bytes.
"""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import torch
from torch.cpu import Stream, current_stream, is_available, set_device, stream, synchronize  # noqa: F401  for verl

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state
manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


class _CpuDevice(str):
    """The string ``"cpu"`` where a device is wanted and ``0`` inside a device string.

    verl passes the current device to ``.to()``, where an index would mean an accelerator, and also puts it after a
    colon: ``torch.device(f"{get_device_name()}:{get_device_id()}")`` (verl/utils/fsdp_utils.py,
    ``load_fsdp_model_to_gpu``, verl 0.9.1).
    """

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def current_device() -> str:
    """Return the device in a form that serves as ``"cpu"`` and, in an f-string, as its index."""
    return _CpuDevice("cpu")


def device_count() -> int:
    """Return 1: the host counts as one device."""
    return 1


def get_device_name(device: object = None) -> str:
    """Return ``"cpu"``."""
    return "cpu"


def get_device_properties(device: object = None) -> SimpleNamespace:
    """Return an object with the fields ``name`` and ``total_memory`` (bytes)."""
    return SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (available, total) memory of the host in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: object = None) -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


memory_reserved = memory_allocated
max_memory_allocated = memory_allocated
max_memory_reserved = memory_allocated


def empty_cache() -> None:
    """Do nothing: the host allocator keeps no cache that torch could empty."""


def ipc_collect() -> None:
    """Do nothing: no memory is shared through device handles."""


def reset_peak_memory_stats(device: object = None) -> None:
    """Do nothing: no peak is recorded."""


def reset_accumulated_memory_stats(device: object = None) -> None:
    """Do nothing: no statistics are accumulated."""


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Do nothing: host memory is not rationed between processes."""
