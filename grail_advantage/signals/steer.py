"""STEER: tokens whose update would change the entropy most weigh least.

Source: arXiv 2510.10150 and its code, with the linear map. ``e = |A (1 - p) (log p + H)|`` estimates the change of the
policy's entropy by a step on the token. There ``p`` and ``H`` are those of the moving policy; here those before the update,
which are the same in the first mini-batch of a step with verl.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import NormalizeMass, Reshaped, Signal
from grail_advantage.signals.policy_columns import entropy, surprisal


@register_signal("steer")
class Steer(Signal):
    """Weights fall linearly from 1.2 at the batch's least ``e`` to 0.8 at its largest.

    The tokens of responses with advantage 0 are not compared. Where all are equal, every token has weight 1.
    """

    formula = "from 1.2 at the batch's least e to 0.8 at its largest, linearly; e = |A (1 - p) (log p + H)|"
    source = "arXiv 2510.10150 (zz-haooo/STEER, `verl/trainer/ppo/core_algos.py`, `compute_token_weights`, `linear`)"
    reads = frozenset({OLD_LOG_PROBS, ENTROPY})

    highest: float = option(1.2, "weight of the token that changes the entropy least; at least 1", ge=1)

    lowest: float = option(0.8, "weight of the token that changes the entropy most; in [0, 1]", ge=0, le=1)

    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        surprisal_BT = surprisal(batch)
        change_BT = -torch.expm1(-surprisal_BT) * (entropy(batch) - surprisal_BT)
        return (batch.advantages_B.double().unsqueeze(1) * change_BT).abs()

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        compared_N = scores_BT[statistics_BT].double()
        least, most = compared_N.min(), compared_N.max()
        if least == most:
            return Reshaped(torch.ones_like(scores_BT))
        place_BT = (scores_BT.double() - least) / (most - least)
        return Reshaped((self.highest - (self.highest - self.lowest) * place_BT).float())
