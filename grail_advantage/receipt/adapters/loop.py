"""A loop of one's own: hand the loss to :func:`train_step`, and get the receipt of an optimiser step.

Shape suffixes: B responses, b of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import Batch, Loss, Receipt, check, watch


def train_step(
    log_probs_of: Callable[[torch.Tensor], torch.Tensor],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    loss: Loss,
    micro_batches: Sequence[torch.Tensor],
) -> Receipt:
    """One optimiser step over the micro-batches, and what its tokens received.

    Args:
        log_probs_of: rows (b,) to log-probabilities (b, T) with a history.
        loss_of: these and the rows to the micro-batch's loss, whose gradients are summed.
        optimizer: is stepped once.
        batch: as intended; on the rows' places.
        loss: as the settings say.
        micro_batches: rows (b,) of each.
    """
    with watch() as watched:
        optimizer.zero_grad()
        for rows_b in micro_batches:
            log_probs_bT = log_probs_of(rows_b)
            watched.read(log_probs_bT, rows_b)
            loss_of(log_probs_bT, rows_b).backward()
        optimizer.step()
    return check(batch, loss, watched.pieces)
