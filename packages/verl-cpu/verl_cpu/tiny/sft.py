"""Supervised fine-tuning (SFT), one loop for every warm-up. Shape suffixes: B rows, L tokens, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Row = tuple[list[int], list[int]]
"""Token ids, and for each its label: the id itself, or ``IGNORED`` where it is not trained on."""
IGNORED = -100


def labelled(prompt: list[int], response: list[int]) -> Row:
    """A row whose response is trained on, and whose prompt is not."""
    return prompt + response, [IGNORED] * len(prompt) + response


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterable[list[Row]],
    learning_rate: Callable[[int], float],
    *,
    micro_batches: int = 1,
) -> Iterator[tuple[int, float]]:
    """Train ``model`` in place by AdamW, and yield each step's number, from 1 on, and its loss.

    Args:
        batches: one a step; they may be made while it trains.
        learning_rate: of a step, by its number.
        micro_batches: a batch goes through the model in so many parts of like length. More than one pad less; the gradient is
            the same up to rounding.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, rows in enumerate(batches, start=1):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = _add_gradient(model, tokenizer.pad_token_id, rows, micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        yield step, loss.item()


def _add_gradient(model: PreTrainedModel, padding: int, rows: list[Row], parts: int) -> torch.Tensor:
    """Add the gradient of the mean cross-entropy over the labels; its value, a float32 scalar."""
    if parts > 1:
        rows = sorted(rows, key=lambda one: len(one[0]))
    labels = sum(label != IGNORED for _, labels in rows for label in labels)
    size = math.ceil(len(rows) / parts)
    total = torch.zeros((), device=model.device)
    for first in range(0, len(rows), size):
        loss = _summed_loss(model, padding, rows[first : first + size]) / labels
        loss.backward()
        total += loss.detach()
    return total


def _summed_loss(model: PreTrainedModel, padding: int, rows: Sequence[Row]) -> torch.Tensor:
    longest = max(len(ids) for ids, _ in rows)
    ids_BL = torch.tensor([ids + [padding] * (longest - len(ids)) for ids, _ in rows])
    labels_BL = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows])
    # Right padding needs no attention mask: a causal model's real tokens never look at it.
    logits_BLV = model(input_ids=ids_BL.to(model.device)).logits[:, :-1].flatten(0, 1).float()
    labels_BL = labels_BL[:, 1:].to(model.device)
    return F.cross_entropy(logits_BLV, labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
