"""The control of ``surprisal``: the same rows, the same map to weights, a random token in place of the least likely one.

A package of its own, so that it is no method among the others: ``pip install study/random_token``.
"""

from __future__ import annotations

import zlib

import torch

from grail_advantage import RolloutBatch, register_signal
from grail_advantage.batch import OLD_LOG_PROBS
from grail_advantage.signals.surprisal import SurprisalConfig


@register_signal("random_token")
class RandomTokenConfig(SurprisalConfig):
    """Score: random numbers, other ones for every batch, the same ones for the same batch."""

    formula = "1 on a random reasoning token of each wrong row, else 0"
    source = "control of the second study"

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """See :class:`grail_advantage.signals.base.Signal`."""
        column_BT = batch.columns_BT[OLD_LOG_PROBS]
        own = zlib.crc32(column_BT.detach().float().cpu().numpy().tobytes())
        return torch.rand(column_BT.shape, generator=torch.Generator().manual_seed(own)).to(column_BT)
