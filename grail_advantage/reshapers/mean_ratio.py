"""Mean-ratio map: a token's weight follows its score's distance from the response's mean score, in parts of that mean.

For scores of at least 0 and a strength of at most 1 a response's mean weight is 1, whatever their distribution.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.options import option
from grail_advantage.registry import register_reshaper
from grail_advantage.reshapers.base import Reshaper


@register_reshaper("mean_ratio")
class MeanRatio(Reshaper):
    """``max(0, 1 + beta (x / mean x - 1))``, the mean over the response's statistics set."""

    lowest = 0.0

    beta: float = option(
        0.1,
        "weight added where the score exceeds the response's mean by as much as that mean is; greater than 0",
        gt=0,
        why="for equal weights train with adv_estimator=uniform",
    )

    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """See :class:`Reshaper`. All 1 where the mean is not above 0; in float64. Meant for scores of at least 0: where scores
        of both signs cancel, the mean is no measure of them and weights grow without bound."""
        known_BT = torch.where(statistics_BT, scores_BT.double(), 0.0)
        count_B1 = statistics_BT.sum(dim=-1, keepdim=True).clamp(min=1)
        mean_B1 = known_BT.sum(dim=-1, keepdim=True) / count_B1
        weights_BT = (1 + self.beta * (known_BT / mean_B1 - 1)).clamp(min=0)
        return torch.where(statistics_BT & (mean_B1 > 0), weights_BT, 1.0).float()
