"""High-entropy tokens only: the fifth of a batch's tokens where the policy was most undecided trains, the rest does not.

Source: "Beyond the 80/20 rule", arXiv 2506.01939. Its equation divides the loss by the number of all tokens, its code by the
number of kept ones; the option ``denominator`` chooses, by default as the code. The code cuts in each micro-batch of the
update, with the current policy, and of equal entropies keeps as many as fit; here the whole batch has one cut, with the policy
before the update, and all equal ones are kept, as in the equation.

Shape suffixes: B responses, T response tokens, N tokens of all responses.
"""

from __future__ import annotations

from typing import Literal

import torch

from grail_advantage.batch import ENTROPY, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.top import count_of_share
from grail_advantage.signals.base import NormalizeMass, Reshaped, Signal
from grail_advantage.signals.policy_columns import entropy


@register_signal("high_entropy")
class HighEntropy(Signal):
    """1, or N / k, on the tokens of highest entropy in the batch, 0 on the others.

    All responses are compared, those with advantage 0 as well. Tokens that tie at the cut are all kept. With
    ``normalize_mass`` a response without any token kept stays at 0.
    """

    formula = "N / k on the k of the batch's N tokens with the highest H, else 0; rho = k / N = 0.2"
    source = (
        "80/20, arXiv 2506.01939 (Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR, `verl/trainer/ppo/core_algos.py`, "
        "`get_global_entropy_top_mask`)"
    )
    reads = frozenset({ENTROPY})
    ranks_entropy = True
    whole_batch = True

    rho: float = option(0.2, "share of the batch's tokens that is kept, rounded up; in (0, 1]", gt=0, le=1)

    denominator: Literal["selected", "all"] = option(
        "selected",
        "what the loss is averaged over: the tokens kept (selected: the weights are multiplied by N / k, so that their mean is "
        "1), or all",
    )

    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return entropy(batch)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        values_N = scores_BT[statistics_BT]
        count = int(count_of_share(self.rho, statistics_BT.sum()))
        cut = values_N.kthvalue(values_N.numel() - count + 1).values
        kept_BT = statistics_BT & (scores_BT >= cut)
        weight = values_N.numel() / int(kept_BT.sum()) if self.denominator == "selected" else 1.0
        return Reshaped(kept_BT.float() * weight)
