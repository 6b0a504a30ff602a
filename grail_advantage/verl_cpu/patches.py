"""All code of this platform that replaces code of verl or torch; each with its reason.

``tests/verl_cpu/test_cpu_platform.py`` looks whether each is still needed.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch.distributed.fsdp import _init_utils
from verl.utils import distributed


def patch() -> None:
    """Apply all of them, before the modules that import verl's functions by name are loaded."""
    process_group_without_a_second_cpu()
    fsdp1_synchronises_cpu_states()
    pinned_memory_is_plain_memory()


def process_group_without_a_second_cpu() -> None:
    """Pass the backend ``cpu:gloo`` where the caller of ``initialize_global_process_group_ray`` leaves it open.

    Works around ``verl/utils/distributed.py`` (verl 0.9.1), which builds ``cpu:gloo,<device>:<backend>``: on the CPU platform
    that is ``cpu:gloo,cpu:gloo``, and torch refuses to have one device twice. Can go when verl leaves the second half away on
    ``cpu``.
    """
    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def fsdp1_synchronises_cpu_states() -> None:
    """Let FSDP1 synchronise module states in host memory.

    verl builds FSDP1 with ``sync_module_states=True`` (verl/workers/engine/fsdp/transformer_impl.py,
    ``FSDPEngine._build_fsdp_module``, verl 0.9.1), because only rank 0 holds loaded weights. torch 2.13 refuses that for CPU
    tensors (torch/distributed/fsdp/_init_utils.py, ``_check_module_states_for_sync_module_states``): its broadcast was written
    for NCCL. Gloo broadcasts CPU tensors. Can go when torch drops the check for process groups with a CPU backend.
    """
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def pinned_memory_is_plain_memory() -> None:
    """Make ``torch.Tensor.pin_memory`` return the tensor itself.

    verl keeps the reference policy offloaded in pinned memory (``FSDPEngine._build_fsdp_module``, verl 0.9.1:
    ``CPUOffloadPolicy(pin_memory=True)`` with FSDP2, ``CPUOffload(offload_params=True)`` with FSDP1, which pins too), and torch
    pins memory only next to an accelerator. Pinned memory holds the same values; it serves faster copies to a device. Can go
    when verl leaves the offload of the reference policy to the configuration.
    """
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
