"""All code of this platform that replaces code of verl or torch; each with its reason."""

from functools import partial, wraps
from typing import Any

import ray
import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import _init_utils
from verl.utils import distributed, torch_functional
from verl.workers.rollout import base

CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Logits that :func:`log_probabilities_in_few_calls` reduces in one call, by device; its temporary results are as
large. A GPU waits for a call's start rather than for its memory."""


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
    distributed.initialize_global_process_group_ray = partial(
        distributed.initialize_global_process_group_ray, backend="cpu:gloo"
    )


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
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign, assignment, return-value]


class LabelLogProbs(torch.autograd.Function):
    """The labels' log-probabilities, (N,), of logits (N, V) and labels (N,), as flash-attn's cross entropy has them: of
    logits in a lower precision they are float32, and so is what their gradient is computed from. Between forward and
    backward nothing is kept but the arguments and one number a row."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        chunks = logits_NV.split(_rows(logits_NV))
        normalisers_N = torch.cat([torch.logsumexp(_exact(chunk), dim=-1) for chunk in chunks])
        ctx.save_for_backward(logits_NV, labels_N[:, None], normalisers_N[:, None])
        return _exact(logits_NV.gather(-1, labels_N[:, None]).squeeze(-1)) - normalisers_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, labels_N1, normalisers_N1 = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        rows = _rows(logits_NV)
        for start in range(0, len(logits_NV), rows):
            part = slice(start, start + rows)
            upstream = upstream_N[part, None]
            probabilities = torch.exp(_exact(logits_NV[part]) - normalisers_N1[part])
            # The gradient of a label's log-probability is 1 at the label, less the probabilities.
            gradient_NV[part] = (probabilities * -upstream).scatter_add_(
                -1, labels_N1[part], upstream
            )
        return gradient_NV, None


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _rows(logits_NV: torch.Tensor) -> int:
    return max(1, CHUNK[logits_NV.device.type] // logits_NV.shape[-1])


def log_probabilities_in_few_calls() -> None:
    """Compute the labels' log-probabilities of many tokens in one call.

    Works around ``verl.utils.torch_functional.logprobs_from_logits_v2`` (verl 0.9.1), which verl takes where there is
    no flash-attn. It saves memory by a loop over the first dimension, which with packed rows is one token: nearly half
    of the training side's time with a small vocabulary, and without end on a GPU. In float32 values and gradients are
    the same, bit for bit. In bfloat16 verl's are rounded to 8 bits, 0.016 at -4; these are float32, as with flash-attn.
    Can go when verl's loop goes over more than one row at a time, and keeps them in float32.
    """

    @wraps(torch_functional.logprobs_from_logits_v2)
    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_probs_N = LabelLogProbs.apply(logits.flatten(0, -2), labels.flatten())
        return log_probs_N.view(labels.shape)

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
