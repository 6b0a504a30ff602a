"""SkyRL (NovaSky-AI/SkyRL, at a956457): a policy worker's loss function, which gets the action log-probabilities.

SkyRL divides the advantages of a mini-batch by what ``loss_reduction`` says and sums the loss; the receipt's batch has them as
they are before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import Loss, Watch

REDUCTIONS = {
    "token_mean": ("token-mean", "update"),
    "token_mean_legacy": ("token-mean", "micro-batch"),
    "sequence_mean": ("seq-mean-token-mean", "update"),
    "seq_mean_token_sum_norm": ("seq-mean-token-sum-norm", "update"),
}
"""Aggregation and what the mean is over, by ``loss_reduction``."""


def loss_of(algorithm: Any) -> Loss:
    """The loss of ``cfg.trainer.algorithm``; one without a formula here is checked by structure alone."""
    kind, reduction = str(algorithm.policy_loss_type), str(algorithm.loss_reduction)
    cap = algorithm.clip_ratio_c if kind == "dual_clip" else None
    options = {"low": algorithm.eps_clip_low, "high": algorithm.eps_clip_high, "cap": cap, "bound": 20.0}
    known = kind in ("regular", "dual_clip") and reduction in REDUCTIONS
    known = known and not getattr(algorithm, "use_kl_loss", False)  # whose mean is another one
    aggregation, over = REDUCTIONS.get(reduction, REDUCTIONS["token_mean"])
    norm = float(algorithm.max_seq_len) if aggregation == "seq-mean-token-sum-norm" else None
    return Loss(kind, "clip" if known else None, aggregation, over, norm, options)


@contextmanager
def reading(worker: Any, watched: Watch, rows: Sequence[int]) -> Iterator[None]:
    """Within, ``worker.forward_backward`` of a mini-batch is read.

    Args:
        worker: its policy worker.
        watched: collects the pieces; ``step()`` it after ``optim_step``.
        rows: places of the mini-batch's responses on this rank, in its order, in the batch of all ranks.
    """
    loss_fn, place, rank = worker.policy_loss_fn, 0, worker.mesh_rank.dp

    def read(log_probs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal place
        watched.read(log_probs, list(rows[place : place + len(log_probs)]), rank=rank)
        place += len(log_probs)
        return loss_fn(log_probs, *args, **kwargs)

    try:
        worker.policy_loss_fn = read
        yield
    finally:
        worker.policy_loss_fn = loss_fn
