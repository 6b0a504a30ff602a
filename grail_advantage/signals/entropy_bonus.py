"""Entropy bonus: the advantage grows with the entropy at each token, by at most a part of itself.

Source: arXiv 2506.14758, ``A_t = A + min(alpha H, |A| / kappa)``, written as a weight. The bonus is added whatever the sign of
the advantage, so that an incorrect response's undecided tokens are pushed down less.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import ENTROPY, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import NormalizeMass, Reshaped, Signal
from grail_advantage.signals.policy_columns import entropy


@register_signal("entropy_bonus")
class EntropyBonus(Signal):
    """``1 + sign(A) min(alpha H / |A|, 1 / kappa)``; 1 where the advantage is 0."""

    formula = "1 + sign(A) min(0.4 H / |A|, 1 / 2)"
    source = "arXiv 2506.14758 (from descriptions of it; neither the paper's text nor code was read)"
    reads = frozenset({ENTROPY})

    alpha: float = option(
        0.4,
        "advantage added for each nat of entropy; greater than 0",
        gt=0,
        why="for equal weights train with adv_estimator=uniform",
    )

    kappa: float = option(
        2.0,
        "the bonus is at most the kappa-th part of the advantage; greater than 1",
        gt=1,
        why="otherwise the bonus outweighs a negative advantage",
    )

    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return entropy(batch)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        advantages_B1 = batch.advantages_B.unsqueeze(-1)
        bonus_BT = (self.alpha * scores_BT.double() / advantages_B1.abs()).clamp(max=1 / self.kappa)
        weights_BT = torch.where(advantages_B1 != 0, 1 + advantages_B1.sign() * bonus_BT, 1.0)
        return Reshaped(weights_BT.float(), 1 - 1 / self.kappa, 1 + 1 / self.kappa)
