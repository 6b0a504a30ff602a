"""Advantage reweighting: probable tokens weigh more, so that the large gradients of improbable ones do not drown theirs.

Source: "Do not let low-probability tokens over-dominate", arXiv 2505.12929, and its code; not its second method, which updates
improbable and probable tokens in turn.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import OLD_LOG_PROBS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import NormalizeMass, Reshaped, Signal
from grail_advantage.signals.policy_columns import surprisal


@register_signal("probability")
class Probability(Signal):
    """``alpha p + 1 - alpha``, with p the token's probability."""

    formula = "0.2 p + 0.8"
    source = "advantage reweighting, arXiv 2505.12929 (zhyang2226/AR-Lopti, `verl/trainer/ppo/ray_trainer.py`, `both_linear`)"
    reads = frozenset({OLD_LOG_PROBS})

    alpha: float = option(
        0.2,
        "how much less an impossible token weighs than a certain one, which has weight 1; in (0, 1]",
        gt=0,
        le=1,
        why="the weights lie between 1 - alpha and 1",
    )

    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return torch.exp(-surprisal(batch))

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        return Reshaped((self.alpha * scores_BT.double() + 1 - self.alpha).float())
