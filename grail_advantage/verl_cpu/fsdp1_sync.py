"""Patch: FSDP1 may synchronise module states that live on the CPU.

verl builds FSDP1 with ``sync_module_states=True`` (verl/workers/engine/fsdp/transformer_impl.py,
``FSDPEngine._build_fsdp_module``, verl 0.9.1), because only rank 0 holds loaded weights. torch 2.13 refuses that for CPU
tensors (torch/distributed/fsdp/_init_utils.py, ``_check_module_states_for_sync_module_states``): its broadcast was
written for NCCL. Gloo broadcasts CPU tensors, so the check is all that stands in the way. It can go when torch drops
the check for process groups with a CPU backend. FSDP2 does not need it.
"""

from __future__ import annotations

from torch.distributed.fsdp import _init_utils


def patch() -> None:
    """Turn torch's refusal into an accepted call."""
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None
