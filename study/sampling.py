"""Sampling for the study: each row draws from random numbers of its own, and a finished row costs nothing more.

A row's response depends on its prompt, the model and the row's own random numbers, not on the rows beside it (up to rounding
of the model's sums); two arms that sample from the same numbers draw the same wherever their models agree.

Shape suffixes: B rows, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import sdpa_mask

ROWS_TOGETHER = 512


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    uniform_BT: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> list[list[int]]:
    """One response a prompt: token ids including the end token, if it was reached.

    Args:
        model: the policy.
        tokenizer: for the padding and end tokens.
        prompts: token ids.
        uniform_BT: float64 in [0, 1); number t of a row draws its token t, and T is the length limit.
        temperature: logits are divided by it; 0 is greedy and reads no numbers.
    """
    responses: list[list[int]] = []
    with _grouped_attention(model):
        for first in range(0, len(prompts), ROWS_TOGETHER):
            rows = slice(first, first + ROWS_TOGETHER)
            responses += _sample_together(model, tokenizer, prompts[rows], uniform_BT[rows], temperature)
    return responses


def _sdpa_grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' ``sdpa``, which copies keys and values for every query head wherever there is a mask. On the CPU torch
    needs no copy, and gives the same to the last bit."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None and query.shape[2] > 1,
        enable_gqa=True,
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_grouped", _sdpa_grouped)
AttentionMaskInterface.register("sdpa_grouped", sdpa_mask)


@contextmanager
def _grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model with ``sdpa`` attention uses :func:`_sdpa_grouped`."""
    before = model.config._attn_implementation
    if before == "sdpa":
        model.set_attn_implementation("sdpa_grouped")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _sample_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    uniform_BT: torch.Tensor,
    temperature: float,
) -> list[list[int]]:
    # A prompt is read once for all samples of it that are next to each other.
    asked = [ids for ids, before in zip(prompts, [None, *prompts], strict=False) if ids != before]
    owner_B = (
        torch.tensor([ids != before for ids, before in zip(prompts, [None, *prompts], strict=False)]).cumsum(0) - 1
    )
    longest = max(len(ids) for ids in asked)
    tokens_BL = torch.tensor([[tokenizer.pad_token_id] * (longest - len(ids)) + list(ids) for ids in asked])
    starts_B1 = torch.tensor([[longest - len(ids)] for ids in asked])
    mask_BL = (torch.arange(longest) >= starts_B1).long()
    positions_BL = (torch.arange(longest) - starts_B1).clamp(min=0)
    responses: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts))
    cache = DynamicCache()
    for token in range(uniform_BT.shape[1]):
        logits_BV = model(
            input_ids=tokens_BL,
            attention_mask=mask_BL,
            position_ids=positions_BL,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        if token == 0:
            logits_BV, mask_BL, positions_BL = logits_BV[owner_B], mask_BL[owner_B], positions_BL[owner_B]
            cache.batch_select_indices(owner_B)
        next_B = _draw(logits_BV.double(), uniform_BT[alive, token], temperature)
        for row, chosen in zip(alive.tolist(), next_B.tolist(), strict=True):
            responses[row].append(chosen)
        going = (next_B != tokenizer.eos_token_id).nonzero().flatten()
        if not len(going):
            break
        if len(going) < len(alive):
            alive = alive[going]
            cache.batch_select_indices(going)
        tokens_BL = next_B[going, None]
        mask_BL = torch.cat([mask_BL[going], torch.ones_like(tokens_BL)], dim=1)
        positions_BL = positions_BL[going, -1:] + 1
    return responses


def _draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float) -> torch.Tensor:
    """The token at which the running sum of the probabilities passes the row's number, int64 (B,)."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    running_BV = (logits_BV / temperature).softmax(dim=-1).cumsum(dim=-1)
    # The sum may end below 1 by rounding; the number is scaled so that a token of probability 0 is never drawn at the end.
    return torch.searchsorted(running_BV, (uniform_B * running_BV[:, -1])[:, None], right=True)[:, 0]
