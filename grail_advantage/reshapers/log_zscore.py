"""Log-z-score reshaping: standardised log scores, scaled and clipped.

Source: GRAIL (arXiv 2606.04889).

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.options import Options, option
from grail_advantage.registry import register_reshaper
from grail_advantage.reshapers.base import Reshaper

EPSILON = 1e-8


class LogZscoreOptions(Options):
    """The options that signals repeat as their own."""

    weight_mean: float = option(
        1.0,
        "log-z-score: weight at the mean log score; where answers have weights of their own, also that of their boundary and "
        "of everything after it",
        ge=0,
        why="a negative weight flips the advantage",
    )

    weight_std: float = option(
        0.5,
        "log-z-score: weight added per standard deviation of the log score; greater than 0",
        gt=0,
        why="for equal weights train with adv_estimator=uniform",
    )

    weight_min: float = option(
        0.5, "log-z-score: lower clip of the weights; at least 0", ge=0, why="negative weights flip the advantage"
    )

    weight_max: float = option(5.0, "log-z-score: upper clip of the weights; at least weight_min", ge=0)

    def check(self) -> None:
        if self.weight_min > self.weight_max:
            raise ValueError(
                f"{self.section}.weight_min={self.weight_min} is greater than {self.section}.weight_max={self.weight_max}; "
                "swap them"
            )
        super().check()


@register_reshaper("log_zscore")
class LogZscore(LogZscoreOptions, Reshaper):
    """``clip(weight_mean + weight_std z, weight_min, weight_max)``: ``z`` is the log score, standardised over the response's
    statistics set."""

    @property
    def lowest(self) -> float:  # type: ignore[override]
        return self.weight_min

    @property
    def highest(self) -> float:  # type: ignore[override]
        return self.weight_max

    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """See :class:`Reshaper`. Negative scores, as the drop of a likelihood can be, count as 0."""
        z_BT = log_zscore(scores_BT.clamp(min=0), statistics_BT)
        return torch.clamp(self.weight_mean + self.weight_std * z_BT, self.weight_min, self.weight_max)


def log_zscore(scores_BT: torch.Tensor, statistics_mask_BT: torch.Tensor) -> torch.Tensor:
    """Standardise log scores over the tokens of each response's statistics set.

    ``l = log(score + 1e-8)``, ``z = (l - mean) / sqrt(variance + 1e-8)`` with the population variance. In float64: where the
    scores of a response are nearly equal, the division blows up what float32 rounds off the mean.

    Args:
        scores_BT: scores, at least 0, any floating dtype; finite where the mask is true.
        statistics_mask_BT: bool; tokens that count for mean and variance.

    Returns:
        ``z_BT`` float32 for every token; 0 in a response whose statistics set is empty.
    """
    log_scores_BT = torch.log(scores_BT.double() + EPSILON)
    count_B1 = statistics_mask_BT.sum(dim=-1, keepdim=True)
    divisor_B1 = count_B1.clamp(min=1)

    def mean(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(statistics_mask_BT, values_BT, 0.0).sum(dim=-1, keepdim=True) / divisor_B1

    centred_BT = log_scores_BT - mean(log_scores_BT)
    z_BT = centred_BT / torch.sqrt(mean(centred_BT.square()) + EPSILON)
    return torch.where(count_B1 > 0, z_BT, 0.0).float()
