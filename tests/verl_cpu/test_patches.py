"""The functions that the CPU platform puts in the place of verl's give what verl's give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from verl.utils import torch_functional
from verl.workers.rollout import base

from verl_cpu import patches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 37), (5, 60, 37)])
def test_log_probabilities_are_those_of_verls_loop(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, bit for bit, of chunks that do not divide the rows and of labels at both ends of the vocabulary."""
    in_a_loop = torch_functional.logprobs_from_logits_v2
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", in_a_loop)  # taken back afterwards
    monkeypatch.setattr(patches, "CHUNK", 7 * 37 + 1)
    patches.log_probabilities_in_few_calls()
    assert torch_functional.logprobs_from_logits_v2 is not in_a_loop

    generator = torch.Generator().manual_seed(0)
    logits = (40 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(37, shape[:-1], generator=generator)
    labels[0], labels[-1] = 0, 36
    upstream = torch.randn(shape[:-1], generator=generator).to(dtype)
    seen = []
    for function in (in_a_loop, torch_functional.logprobs_from_logits_v2):
        leaf = logits.clone().requires_grad_()
        values = function(leaf, labels)
        values.backward(upstream)
        seen.append((values.detach(), leaf.grad))
    (values, gradients), (patched_values, patched_gradients) = seen
    assert torch.equal(values, patched_values)
    assert torch.equal(gradients, patched_gradients)
    assert values.min() < -50 and gradients.abs().max() > 0.1


def test_two_clusters_send_weights_through_two_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's class is replaced, and its socket's name tells clusters apart whose first job has the same id."""
    monkeypatch.setitem(base._ROLLOUT_REGISTRY, ("vllm", "async"), "verl's")
    patches.one_socket_a_cluster()
    assert base._ROLLOUT_REGISTRY["vllm", "async"] == "verl_cpu.vllm.CpuServerAdapter"
    names = []
    for port in (6379, 6380):
        context = SimpleNamespace(get_job_id=lambda: "01000000", gcs_address=f"127.0.0.1:{port}")
        monkeypatch.setattr(patches.ray, "get_runtime_context", lambda context=context: context)
        names.append(patches.cluster_job_id())
    assert names == ["01000000-6379", "01000000-6380"]
