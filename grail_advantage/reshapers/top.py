"""Hard selection: the highest-scored tokens of a response carry its whole advantage, the others none.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.options import option
from grail_advantage.registry import register_reshaper
from grail_advantage.reshapers.base import Reshaper

ROUNDING = 1e-12
"""A product of a share and a count is taken this much lower, relatively: 0.07 * 100 is a little more than 7 in floats."""


def count_of_share(share: float, count: torch.Tensor) -> torch.Tensor:
    """``max(1, ceil(share * count))``, int64 in the shape of ``count``."""
    return torch.ceil(share * (1 - ROUNDING) * count.double()).long().clamp(min=1)


def top_tokens(scores_BT: torch.Tensor, mask_BT: torch.Tensor, count_B1: torch.Tensor | int) -> torch.Tensor:
    """Each response's highest-scored tokens, exactly as many as asked for where there are that many; of equal scores
    the earlier.

    Args:
        scores_BT: scores, any floating dtype; finite where the mask is true.
        mask_BT: bool; the tokens to choose from.
        count_B1: how many of each response.

    Returns:
        bool (B, T).
    """
    # Adding 0 turns a negative zero into a positive one, so that no sort distinguishes them.
    known_BT = torch.where(mask_BT, scores_BT.double() + 0.0, -torch.inf)
    order_BT = known_BT.sort(dim=-1, descending=True, stable=True).indices
    places_BT = torch.arange(order_BT.shape[-1], device=order_BT.device).expand_as(order_BT)
    rank_BT = torch.empty_like(order_BT).scatter_(-1, order_BT, places_BT)
    return mask_BT & (rank_BT < count_B1)


@register_reshaper("top")
class Top(Reshaper):
    """1 on the response's highest-scored tokens of the statistics set, 0 on all its other tokens. Of equal scores the
    earlier ones are chosen, so that exactly as many tokens have weight 1 as asked for, or all where the set has
    fewer."""

    elsewhere = 0.0
    ranks = True

    k: int = option(1, "number of tokens of a response that have weight 1; at least 1", ge=1)

    share: float | None = option(
        None,
        "share of the response's scored tokens that have weight 1, rounded up, in place of k; in (0, 1]",
        gt=0,
        le=1,
    )

    def check(self) -> None:
        if self.share is not None and self.k != 1:
            raise ValueError(f"{self.section}.k={self.k} and {self.section}.share={self.share}: give one of the two")
        super().check()

    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        count_B1 = self.k
        if self.share is not None:
            count_B1 = count_of_share(self.share, statistics_BT.sum(dim=-1, keepdim=True))
        return top_tokens(scores_BT, statistics_BT, count_B1).float()
