"""Patch: pinning host memory gives back the memory as it is.

verl keeps the reference policy offloaded in pinned memory (verl/workers/engine/fsdp/transformer_impl.py,
``FSDPEngine._build_fsdp_module``, verl 0.9.1: ``CPUOffloadPolicy(pin_memory=True)`` with FSDP2,
``CPUOffload(offload_params=True)`` with FSDP1, which pins too). torch pins memory only next to an accelerator and raises
without one. Pinned or not, the memory holds the same values; pinning serves faster copies to a device that is not there. It can
go when verl leaves the offload of the reference policy to the configuration.
"""

from __future__ import annotations

import torch


def patch() -> None:
    """Make ``torch.Tensor.pin_memory`` return the tensor itself."""
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
