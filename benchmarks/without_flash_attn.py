"""Packed rows without flash-attn, at a cost near its own: torch's attention row by row, and log-probabilities in chunks.

verl runs without flash-attn, but not as fast: packed rows get one mask of all tokens by all tokens, and log-probabilities are
taken in a loop over tokens, whose seconds fall on every method alike and hide what a method adds. :func:`install` puts the two
functions of this module in their places. For measurements; a training run should have flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from benchmarks.setup import ROW_BY_ROW

CHUNK = 1024
"""Tokens whose logits are in float32 at one time."""


def install() -> None:
    """Make :func:`attend` known to transformers, which makes no mask for it, and give verl's FSDP engine :func:`log_probs`."""
    from verl.workers.engine.fsdp import transformer_impl

    AttentionInterface.register(ROW_BY_ROW, attend)
    transformer_impl.logprobs_from_logits = log_probs


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    position_ids: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within rows, which begin where the position is 0; query, key and value (1, heads, N, dim)."""
    lengths = getattr(position_ids, "row_lengths", None)
    if lengths is None:  # once for all layers: the GPU is waited for
        starts_R = (position_ids[0] == 0).nonzero()[:, 0]
        lengths = torch.diff(starts_R, append=starts_R.new_tensor([position_ids.shape[1]])).tolist()
        position_ids.row_lengths = lengths  # type: ignore[attr-defined]
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(*row, is_causal=True, scale=scaling, enable_gqa=True) for row in rows]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Log-probabilities of labels in float32; logits (..., V), labels (...).

    As flash-attn's kernel, the backward may write the gradient over the logits.
    """
    flat_N = _LogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), inplace_backward)
    return flat_N.view(labels.shape)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, inplace: bool) -> torch.Tensor:
        normalizer_N = torch.cat([part_KV.float().logsumexp(dim=-1) for part_KV in logits_NV.split(CHUNK)])
        ctx.save_for_backward(logits_NV, labels_N, normalizer_N)
        ctx.inplace = inplace
        return logits_NV.gather(1, labels_N[:, None])[:, 0].float() - normalizer_N

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, labels_N, normalizer_N = ctx.saved_tensors
        gradient_NV = logits_NV.detach() if ctx.inplace else torch.empty_like(logits_NV)
        for start in range(0, len(labels_N), CHUNK):
            part = slice(start, start + CHUNK)
            of_part_K1 = gradient_N[part, None].float()
            part_KV = (logits_NV[part].float() - normalizer_N[part, None]).exp_().mul_(-of_part_K1)
            gradient_NV[part] = part_KV.scatter_add_(1, labels_N[part, None], of_part_K1)
        return gradient_NV, None, None
