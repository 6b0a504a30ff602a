"""Power map: a token weighs in proportion to a power of its score, with mean 1 in each response.

Source: the repository of arXiv 2606.00257, exponent 2 on surprisal.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.options import option
from grail_advantage.registry import register_reshaper
from grail_advantage.reshapers.base import Reshaper

LEAST_SUM = 1e-8
"""A response whose powers sum to less is weighed evenly."""


@register_reshaper("power")
class Power(Reshaper):
    """``n s^g / sum s^g`` over the n tokens of the response's statistics set. Negative scores count as 0."""

    exponent: float = option(
        2.0,
        "exponent g of the score; greater than 0",
        gt=0,
        why="for equal weights train with adv_estimator=uniform",
    )

    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """See :class:`Reshaper`. All 1 where the sum is below 1e-8; in float64."""
        known_BT = torch.where(statistics_BT, scores_BT.double().clamp(min=0), 0.0)
        # Relative to the response's mean, so that no power that matters overflows or underflows.
        count_B1 = statistics_BT.sum(dim=-1, keepdim=True)
        mean_B1 = known_BT.sum(dim=-1, keepdim=True) / count_B1.clamp(min=1)
        powers_BT = torch.where(mean_B1 > 0, known_BT / mean_B1, 0.0).pow(self.exponent)
        sum_B1 = powers_BT.sum(dim=-1, keepdim=True)
        uneven_BT = statistics_BT & (mean_B1.pow(self.exponent) * sum_B1 >= LEAST_SUM)
        return torch.where(uneven_BT, count_B1 * powers_BT / sum_B1, 1.0).float()
