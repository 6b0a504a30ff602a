"""All code of this platform that replaces code of verl or torch; each with its reason."""

from __future__ import annotations

from functools import wraps

import ray
import torch
from torch.distributed.fsdp import _init_utils
from torch.nn import functional
from verl.utils import distributed, torch_functional
from verl.workers.rollout import base

CHUNK = 2**22
"""Logits that :func:`log_probabilities_in_few_calls` reduces in one call; its temporary results are as large."""


def patch() -> None:
    """Apply all of them, before the modules that import verl's functions by name are loaded."""
    process_group_without_a_second_cpu()
    fsdp1_synchronises_cpu_states()
    pinned_memory_is_plain_memory()
    log_probabilities_in_few_calls()
    one_socket_a_cluster()


def process_group_without_a_second_cpu() -> None:
    """Pass the backend ``cpu:gloo`` where the caller of ``initialize_global_process_group_ray`` leaves it open.

    Works around ``verl/utils/distributed.py`` (verl 0.9.1), which builds ``cpu:gloo,<device>:<backend>``: on the CPU
    platform that is ``cpu:gloo,cpu:gloo``, and torch refuses to have one device twice. Can go when verl leaves the
    second half away on ``cpu``.
    """
    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def fsdp1_synchronises_cpu_states() -> None:
    """Let FSDP1 synchronise module states in host memory.

    verl builds FSDP1 with ``sync_module_states=True`` (verl/workers/engine/fsdp/transformer_impl.py,
    ``FSDPEngine._build_fsdp_module``, verl 0.9.1), because only rank 0 holds loaded weights. torch 2.13 refuses that
    for CPU tensors (torch/distributed/fsdp/_init_utils.py, ``_check_module_states_for_sync_module_states``): its
    broadcast was written for NCCL. Gloo broadcasts CPU tensors. Can go when torch drops the check for process groups
    with a CPU backend.
    """
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def pinned_memory_is_plain_memory() -> None:
    """Make ``torch.Tensor.pin_memory`` return the tensor itself.

    verl keeps the reference policy offloaded in pinned memory (``FSDPEngine._build_fsdp_module``, verl 0.9.1), and
    torch pins memory only next to an accelerator. Pinned memory holds the same values; it serves faster copies to a
    device. Can go when verl leaves the offload of the reference policy to the configuration.
    """
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def log_probabilities_in_few_calls() -> None:
    """Compute the labels' log-probabilities of many tokens in one call.

    Works around ``verl.utils.torch_functional.logprobs_from_logits_v2`` (verl 0.9.1), which verl takes where there is
    no flash-attn. It saves memory by a loop over the first dimension, which with packed rows is one token: nearly half
    of the training side's time with a small vocabulary. Values and gradients are the same, bit for bit. Can go when
    verl's loop goes over more than one row at a time.
    """

    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = logits.flatten(0, -2).split(max(1, CHUNK // logits.shape[-1]))
        if logits.dtype in (torch.float32, torch.float64):
            normalisers = torch.cat([torch.logsumexp(chunk, dim=-1) for chunk in chunks])
            of_labels = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            return of_labels - normalisers.view(labels.shape)
        # In a lower precision the difference of two large numbers would be too coarse.
        of_labels = [
            functional.log_softmax(chunk, dim=-1).gather(-1, chunk_labels.unsqueeze(-1)).squeeze(-1)
            for chunk, chunk_labels in zip(chunks, labels.flatten().split(len(chunks[0])), strict=True)
        ]
        return torch.cat(of_labels).view(labels.shape)

    torch_functional.logprobs_from_logits_v2 = logprobs_from_logits_v2


def one_socket_a_cluster() -> None:
    """Send weights to vLLM through a socket that no other Ray cluster of the machine uses.

    Works around ``verl.workers.rollout.vllm_rollout.vllm_rollout.ServerAdapter`` (verl 0.9.1), which names the socket
    by Ray's job id. The first job of every cluster is 01000000, so that of two runs on one machine one may wait for
    ever or receive the other's weights. The server's half is in ``vllm``. Can go when verl's name tells clusters apart.
    """
    base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_cpu.vllm.CpuServerAdapter"


def cluster_job_id() -> str:
    """Ray's job id with the port of the cluster's control service, which only one cluster of a machine can have."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.gcs_address.rpartition(':')[2]}"
