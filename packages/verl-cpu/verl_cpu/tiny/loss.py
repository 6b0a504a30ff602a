"""Rollouts padded into a batch, and the gradient of Dr. GRPO's loss on them. Shape suffixes: B responses, L prompt +
response, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

CLIP = 0.2, 0.28
"""How far a token's ratio may fall and rise."""


class Padded(NamedTuple):
    """Prompts and responses, padded on the right: int64, bool, bool."""

    ids_BL: torch.Tensor
    attention_BL: torch.Tensor
    response_BL: torch.Tensor


def padded(prompts: Sequence[list[int]], responses: Sequence[list[int]], padding: int) -> Padded:
    """Token ids as a batch."""
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    ids_BL = pad_sequence(rows, batch_first=True, padding_value=padding)
    starts_B1, ends_B1 = (torch.tensor([[len(part)] for part in parts]) for parts in (prompts, rows))
    places_L = torch.arange(ids_BL.shape[1])
    attention_BL = places_L < ends_B1
    return Padded(ids_BL, attention_BL, attention_BL & (places_L >= starts_B1))


def group_advantages(rewards_B: torch.Tensor, truncated_B: torch.Tensor, size: int) -> torch.Tensor:
    """Reward minus the mean of its group, which are ``size`` responses in a row, (B,); 0 for a truncated response."""
    advantages_B = rewards_B - rewards_B.view(-1, size).mean(dim=1).repeat_interleave(size)
    return torch.where(truncated_B, 0.0, advantages_B)


def token_log_probs(model: PreTrainedModel, ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities at every place but the first: of its token (B, L - 1), and of the vocabulary (B, L - 1, V).
    Padding on the right needs no attention mask: a causal model's real tokens never look at it."""
    log_probs_BLV = model(input_ids=ids_BL).logits[:, :-1].log_softmax(dim=-1)
    return log_probs_BLV.gather(-1, ids_BL[:, 1:, None])[:, :, 0], log_probs_BLV


def add_gradient(
    model: PreTrainedModel,
    batch: Padded,
    old_log_probs_BL: torch.Tensor,
    advantages_BL: torch.Tensor,
    divisor: float,
    factor_B: torch.Tensor | None = None,
    rows: int = 32,
) -> None:
    """Add the gradient of the loss over a whole batch to the parameters' gradients: the clipped surrogate, summed over
    tokens and divided by a constant. Responses, and their ends, that have no advantage are left out: they add exactly
    nothing.

    Args:
        old_log_probs_BL: of each token under the policy that wrote it.
        divisor: tokens of a response by which the sum is divided, beside the number of responses.
        factor_B: of each response's loss.
        rows: responses of a micro-batch.
    """
    taught_BL = advantages_BL != 0
    ends_B = torch.where(taught_BL, torch.arange(1, taught_BL.shape[1] + 1), 0).amax(dim=1)
    order_B = ends_B.argsort(stable=True)
    order_B = order_B[ends_B[order_B] > 0] if bool(taught_BL.any()) else order_B[:1]  # every parameter has a gradient
    for some in order_B.split(rows):
        ids_BL = batch.ids_BL[some, : max(2, int(ends_B[some].max()))]
        here = some, slice(1, ids_BL.shape[1])
        ratio_BL = (token_log_probs(model, ids_BL)[0] - old_log_probs_BL[here]).exp()
        clipped_BL = ratio_BL.clamp(1 - CLIP[0], 1 + CLIP[1])
        surrogate_BL = torch.minimum(ratio_BL * advantages_BL[here], clipped_BL * advantages_BL[here])
        if factor_B is not None:
            surrogate_BL = surrogate_BL * factor_B[some, None]
        masked_BL = torch.where(batch.response_BL[here], surrogate_BL, 0.0)
        (-masked_BL.sum() / (len(batch.ids_BL) * divisor)).backward()
