"""Packed rows without flash-attn, against a mask of all tokens by all tokens, and log-probabilities against log-softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import without_flash_attn


def test_attention_within_rows() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8) for heads in (4, 2, 2))
    position_ids = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    row_N = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    visible_NN = (row_N[:, None] == row_N).tril()
    expected = F.scaled_dot_product_attention(query, key, value, visible_NN, scale=0.3, enable_gqa=True)
    for _ in range(2):  # the second layer finds the rows again
        found, _ = without_flash_attn.attend(
            torch.nn.Identity(), query, key, value, None, scaling=0.3, position_ids=position_ids
        )
        torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("inplace", [True, False])
def test_log_probs(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_flash_attn, "CHUNK", 3)
    torch.manual_seed(0)
    logits_NV, labels_N, upstream_N = torch.randn(7, 5, requires_grad=True), torch.randint(5, (7,)), torch.randn(7)
    expected_N = logits_NV.log_softmax(-1).gather(1, labels_N[:, None])[:, 0]
    (gradient_NV,) = torch.autograd.grad(expected_N, logits_NV, upstream_N)
    copy_NV = logits_NV.detach().clone().requires_grad_()
    found_N = without_flash_attn.log_probs(copy_NV * 1, labels_N, inplace)
    torch.testing.assert_close(found_N, expected_N)
    torch.testing.assert_close(torch.autograd.grad(found_N, copy_NV, upstream_N)[0], gradient_NV)
