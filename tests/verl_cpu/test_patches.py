"""The functions that the CPU platform puts in the place of verl's give what verl's give."""

from __future__ import annotations

import pytest
import torch
from verl.utils import torch_functional

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
