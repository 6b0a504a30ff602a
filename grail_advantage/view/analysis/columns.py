"""Log-probabilities and entropies of responses, many rows a forward.

The same numbers as :func:`grail_advantage.compute_token_weights` computes row by row where none are given.

Shape suffixes: B rows, L prompt + response, K chosen positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from grail_advantage.model.activations import accepts_logits_to_keep, evaluation_mode, log_probs_and_entropy


def token_batches(lengths: Sequence[int], groups: Sequence[object], tokens: int) -> list[list[int]]:
    """Rows that go through the model together, longest first.

    Args:
        lengths: tokens of each row.
        groups: rows with the same one stay together; give each its own where they need not.
        tokens: most tokens of a batch, padding counted; a group longer than that is a batch by itself.

    Returns:
        Indices of rows; each is in exactly one batch.
    """
    members: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    longest = {group: max(lengths[row] for row in rows) for group, rows in members.items()}
    batches: list[list[int]] = []
    width = 0
    for group in sorted(members, key=lambda group: -longest[group]):
        rows = members[group]
        if not batches or (len(batches[-1]) + len(rows)) * width > tokens:
            batches.append([])
            width = longest[group]
        batches[-1] += rows
    return batches


def padded(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_token: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts with their responses, padded on the right.

    Returns:
        ``(input_ids_BL, attention_BL, response_BL)``; int64, bool, bool.
    """
    width = max(len(prompt) + len(response) for prompt, response in rows)
    input_ids_BL = torch.full((len(rows), width), pad_token, dtype=torch.int64)
    attention_BL = torch.zeros((len(rows), width), dtype=torch.bool)
    response_BL = torch.zeros_like(attention_BL)
    for index, (prompt, response) in enumerate(rows):
        length = len(prompt) + len(response)
        input_ids_BL[index, :length] = torch.tensor([*prompt, *response])
        attention_BL[index, :length] = True
        response_BL[index, len(prompt) : length] = True
    return input_ids_BL.to(device), attention_BL.to(device), response_BL.to(device)


def response_statistics(
    model: PreTrainedModel,
    input_ids_BL: torch.Tensor,
    attention_BL: torch.Tensor,
    response_BL: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward. Log-probability and entropy, in nats, of each response token.

    Args:
        model: a causal language model.
        input_ids_BL: int64, padded on the right.
        attention_BL: bool.
        response_BL: bool; never a row's first token.
        temperature: of the sampling, which logits are divided by.

    Returns:
        ``(log_probs_BL, entropy_BL)`` float32, 0 outside the response.
    """
    log_probs_BL = torch.zeros(input_ids_BL.shape, device=input_ids_BL.device)
    entropy_BL = torch.zeros_like(log_probs_BL)
    columns = response_BL.any(dim=0).nonzero().flatten()
    if not len(columns):
        return log_probs_BL, entropy_BL
    first, past = int(columns[0]), int(columns[-1]) + 1
    kept_K = torch.arange(first - 1, past - 1, device=input_ids_BL.device)
    keep = {"logits_to_keep": kept_K} if accepts_logits_to_keep(model) else {}
    with evaluation_mode(model), torch.no_grad():
        logits_BKV = model(
            input_ids=input_ids_BL[:, : past - 1], attention_mask=attention_BL[:, : past - 1], use_cache=False, **keep
        ).logits
    logits_BKV = logits_BKV if keep else logits_BKV[:, kept_K]
    chosen_BK = response_BL[:, first:past]
    log_probs_BL[response_BL], entropy_BL[response_BL] = log_probs_and_entropy(
        logits_BKV[chosen_BK], input_ids_BL[:, first:past][chosen_BK], temperature
    )
    return log_probs_BL, entropy_BL
