"""Responses of an analysis as batches of tensors.

Shape suffixes: B responses, L prompt + response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def token_batches(lengths: Sequence[int], groups: Sequence[object], tokens: int) -> list[list[int]]:
    """Responses whose weights are computed in one call, longest first.

    Args:
        lengths: tokens of each response.
        groups: responses with the same one stay together; give each its own where they need not.
        tokens: most tokens of a batch, padding counted; a group longer than that is a batch by itself.

    Returns:
        Indices of responses; each is in exactly one batch.
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
