"""Bi-level reshaping: scores below a quantile of their response are damped, those above it boosted.

Source: OAR (arXiv 2601.07408).

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grail_advantage.options import Options, option
from grail_advantage.registry import register_reshaper
from grail_advantage.reshapers.base import Reshaper

FLOOR = 0.1
"""Least weight, before the sum of the response's weights is restored."""

LOWEST_SCORE = -1 + 1e-8
"""Lower scores count as this one. Scores are divergences, at least 0, except that the drop of a likelihood can be a rise."""


class BilevelOptions(Options):
    """The options that signals repeat as their own."""

    quantile: float = option(0.4, "bi-level: share of the tokens with weight below 1; in [0, 1]", ge=0, le=1)

    boost: float = option(
        2.0,
        "bi-level: weight added from the quantile to the highest score; at least 0",
        ge=0,
        why="a negative one weighs the highest scores least",
    )


@register_reshaper("bilevel")
class Bilevel(BilevelOptions, Reshaper):
    """``max(h / tau, 0.1)`` where ``h < tau``, else ``1 + boost (h - tau) / (1 - tau)``: ``h`` is ``log(1 + score)`` scaled to
    [0, 1] over the response's statistics set, and ``tau`` its quantile there. Equal scores all have weight 1; with
    ``tau = 1`` the highest do."""

    lowest = FLOOR
    ranks = True

    quantile_rule: Literal["linear", "sorted"] = option(
        "linear",
        "how a quantile between two scores is taken: linear between them, or sorted: the score at index floor(quantile T)",
    )

    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """See :class:`Reshaper`. In float64."""
        if not statistics_BT.any():  # also where there is no response or no token, of which no extremum could be taken
            return torch.ones(scores_BT.shape, device=scores_BT.device)
        level_BT = torch.log1p(scores_BT.double().clamp(min=LOWEST_SCORE))
        low_B1 = torch.where(statistics_BT, level_BT, torch.inf).amin(dim=-1, keepdim=True)
        high_B1 = torch.where(statistics_BT, level_BT, -torch.inf).amax(dim=-1, keepdim=True)
        uneven_BT = statistics_BT & (high_B1 > low_B1)
        scaled_BT = torch.where(uneven_BT, (level_BT - low_B1) / (high_B1 - low_B1), 0.0)

        tau_B1 = _row_quantile(scaled_BT, statistics_BT, self.quantile, self.quantile_rule)
        damped_BT = (scaled_BT / tau_B1).clamp(min=FLOOR)
        excess_BT = torch.where(tau_B1 < 1, (scaled_BT - tau_B1) / (1 - tau_B1), 0.0)
        weights_BT = torch.where(scaled_BT < tau_B1, damped_BT, 1 + self.boost * excess_BT)
        return torch.where(uneven_BT, weights_BT, 1.0).float()


def _row_quantile(values_BT: torch.Tensor, mask_BT: torch.Tensor, quantile: float, rule: str) -> torch.Tensor:
    """Each response's quantile over its masked values, (B, 1); 0 for a response without any. ``linear`` interpolates
    between the two sorted values next to it; ``sorted`` takes the one at index ``floor(quantile * T)`` of T, the last
    one at most."""
    count_B1 = mask_BT.sum(dim=-1, keepdim=True)
    last_B1 = (count_B1 - 1).clamp(min=0)
    sorted_BT = torch.where(mask_BT, values_BT, torch.inf).sort(dim=-1).values
    sorted_BT = torch.where(count_B1 > 0, sorted_BT, 0.0)
    if rule == "sorted":
        index_B1 = (quantile * count_B1.double()).long()
        return sorted_BT.gather(-1, torch.minimum(index_B1, last_B1))
    place_B1 = quantile * last_B1.double()
    lower_B1 = place_B1.long()
    upper_B1 = torch.minimum(lower_B1 + 1, last_B1)
    below_B1 = sorted_BT.gather(-1, lower_B1)
    return below_B1 + (place_B1 - lower_B1) * (sorted_BT.gather(-1, upper_B1) - below_B1)
