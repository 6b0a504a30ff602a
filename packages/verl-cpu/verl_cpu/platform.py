"""verl's device abstraction (``verl.plugin.platform``) for the host CPU, selected with ``VERL_PLATFORM=cpu``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_cpu import device_module


class CpuPlatform(PlatformBase):
    """The host as verl's only device, with gloo for collectives and shared memory for weight transfer.

    Ray counts slots under the resource name "GPU", the one name verl's resource check knows besides "NPU"; a run
    asks for as many logical slots as it wants trainer ranks (``ray_kwargs.ray_init.num_gpus``).
    """

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never chosen by auto-detection: the user asks for it.
        return False

    def current_device(self) -> str:
        return device_module.current_device()

    def device_count(self) -> int:
        return device_module.device_count()

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register() -> None:
    """Make ``VERL_PLATFORM=cpu`` select :class:`CpuPlatform`."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
