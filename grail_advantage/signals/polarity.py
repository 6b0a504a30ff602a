"""Polarity: the responses of one sign weigh more, or less, than those of the other.

Source: arXiv 2506.01347 and its code. Its names in these options: PSR is ``wrong=0``, NSR is ``right=0``, W-REINFORCE is
``right=0.1``. The paper finds at pass@k that NSR is the better half; this project found at toy scale that leaving wrong
responses out helped accuracy (docs/evidence.md). So try both.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grail_advantage.batch import RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import Reshaped, Signal


@register_signal("polarity")
class Polarity(Signal):
    """One weight for responses with a positive advantage, one for responses with a negative one. With the defaults
    every weight is 1, as with ``uniform``.

    A token's score is the advantage of its response.
    """

    formula = "right where A > 0, wrong where A < 0 (both 1); with spread divided by the response's number of tokens"
    source = (
        "PSR, NSR and W-REINFORCE, arXiv 2506.01347 (TianHongZXY/RLVR-Decomposed, `verl/trainer/ppo/core_algos.py`, "
        "`compute_psr_nsr_outcome_advantage`)"
    )

    right: float = option(1.0, "weight of responses with a positive advantage; at least 0", ge=0)

    wrong: float = option(1.0, "weight of responses with a negative advantage; at least 0", ge=0)

    spread: bool = option(
        False,
        "whether a response's weights are divided by its number of tokens, so that long ones weigh no more than short ones",
    )

    spread_over: Literal["both", "right", "wrong"] = option("both", "the responses in which spread=true divides")

    def check(self) -> None:
        if self.right == self.wrong == 0:
            raise ValueError(
                f"{self.section}.right=0 and {self.section}.wrong=0: nothing would train; give one a weight"
            )
        super().check()

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return batch.advantages_B.unsqueeze(1).expand(batch.mask_BT.shape)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        right_B = batch.advantages_B > 0
        weights_B = torch.where(right_B, self.right, self.wrong).double()
        if self.spread:
            spread_B = {"both": torch.ones_like(right_B), "right": right_B, "wrong": ~right_B}[self.spread_over]
            weights_B = torch.where(spread_B, weights_B / batch.mask_BT.sum(dim=1).clamp(min=1), weights_B)
        return Reshaped(weights_B.float().unsqueeze(1).expand(scores_BT.shape))
