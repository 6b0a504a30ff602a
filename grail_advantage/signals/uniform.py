"""Every token has weight 1: GRPO in this trainer, so that a method differs from its baseline only in the weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from grail_advantage.batch import RolloutBatch
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import RowSelection, Signal


@register_signal("uniform")
class Uniform(Signal):
    """GRPO, with truncated responses masked as for every other method."""

    formula = "1"
    source = "the baseline"

    def select(self, batch: RolloutBatch) -> RowSelection:
        """No response needs scores."""
        rows = super().select(batch)
        return replace(rows, selected_B=torch.zeros_like(rows.selected_B))
