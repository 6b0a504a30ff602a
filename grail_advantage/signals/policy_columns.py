"""Columns that signals read of the policy before the update: surprisal and entropy of the response tokens.

Both come from the forward that gives the old log-probabilities, and cost nothing. A value that is not finite is of a
broken forward and becomes NaN, so that its response has weight 1 whatever is made of it.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, RolloutBatch


def surprisal(batch: RolloutBatch) -> torch.Tensor:
    """``-old_log_prob``, at least 0, float64 (B, T); a sum that rounds can make a log-probability a little positive."""
    return _at_least_zero(-batch.columns_BT[OLD_LOG_PROBS].detach().double())


def entropy(batch: RolloutBatch) -> torch.Tensor:
    """Entropy of the policy at each token's predictor position in nats, at least 0, float64 (B, T)."""
    return _at_least_zero(batch.columns_BT[ENTROPY].detach().double())


def _at_least_zero(values_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(values_BT), values_BT.clamp(min=0), torch.nan)
