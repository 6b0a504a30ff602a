"""verl's device abstraction (``verl.plugin.platform``) for the host CPU, selected with ``VERL_PLATFORM=cpu``."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuDevice(str):
    """The string ``"cpu"`` where a device is wanted and ``0`` inside a device string.

    verl passes the current device to ``.to()``, where an index would mean an accelerator, and also puts it after a
    colon: ``torch.device(f"{get_device_name()}:{get_device_id()}")`` (verl/utils/fsdp_utils.py,
    ``load_fsdp_model_to_gpu``, 0.9.1).
    """

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def _always(value: Any) -> Any:
    """Returns a function of any arguments that returns this."""
    return lambda *_, **__: value


def _memory(device: object = None) -> int:
    """Returns what this process holds, in bytes; it counts as allocated."""
    return psutil.Process().memory_info().rss


def _free(device: object = None) -> tuple[int, int]:
    """Returns the host's available and whole memory in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class Device:
    """Stands in for ``torch.cuda``, by whose names verl calls what ``get_torch_device()`` gives; never instantiated."""

    Stream = torch.cpu.Stream
    current_stream = torch.cpu.current_stream
    is_available = torch.cpu.is_available
    set_device = torch.cpu.set_device
    stream = torch.cpu.stream
    synchronize = torch.cpu.synchronize
    get_rng_state = torch.get_rng_state
    set_rng_state = torch.set_rng_state
    manual_seed = manual_seed_all = torch.manual_seed
    current_device = _always(_CpuDevice("cpu"))
    device_count = _always(1)
    get_device_name = _always("cpu")
    get_device_properties = _always(
        SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)
    )
    mem_get_info = _free
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _memory
    # There is no cache of the device, no memory shared by handles, no peak and no share of a process.
    empty_cache = ipc_collect = set_per_process_memory_fraction = _always(None)
    reset_peak_memory_stats = reset_accumulated_memory_stats = _always(None)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host as verl's only device, with gloo for collectives and shared memory for weight transfer.

    Ray counts slots under the resource name "GPU", the one name verl's resource check knows besides "NPU"; a run asks
    for as many logical slots as it wants trainer ranks (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = vendor_name = property(_always("cpu"))
    device_module = property(_always(Device))
    is_available = _always(True)
    # It is never chosen by auto-detection: the user asks for it.
    is_platform_available = is_ipc_supported = _always(False)
    current_device = _always(_CpuDevice("cpu"))
    device_count = _always(1)
    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    nvtx_range = _always(nullcontext())
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
