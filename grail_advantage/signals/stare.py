"""STARE: while the policy's entropy is low, the least probable tokens of correct responses weigh a little more.

Source: arXiv 2606.19236 and its code. The variants have the code's names: ``O1`` only raises the weight of correct
responses' tokens, ``C2`` also lowers the weight of incorrect responses' tokens. The code chooses tokens in each
mini-batch of the update, with the current policy, and moves the weights in an adaptive variant; here tokens are
chosen once for the whole batch and the weights are fixed.

Shape suffixes: B responses, T response tokens, N tokens of all responses one after the other.
"""

from __future__ import annotations

from typing import Literal

import torch

from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.top import count_of_share, top_tokens
from grail_advantage.signals.base import NormalizeMass, Reshaped, Signal
from grail_advantage.signals.policy_columns import entropy, surprisal


@register_signal("stare")
class Stare(Signal):
    """1.1 on the least probable tenth of all tokens with a positive advantage, while the batch's mean entropy is below 0.3.

    The mean is that of all responses, also those with advantage 0, taken as the run's loss takes it. Of equally
    probable tokens those of earlier responses, and in a response the earlier ones, are chosen, exactly as many as a
    tenth is, rounded up.
    """

    formula = (
        "1.1 on the 10 % of the batch's tokens with A > 0 that have the lowest p, else 1 (C2: 0.9 on those with A < 0); 1 "
        "where the batch's mean H is not below 0.3"
    )
    source = (
        "arXiv 2606.19236, sections 4.1 to 4.3 (hp-luo/STARE, `verl/trainer/ppo/core_algos.py`, "
        "`compute_stare_token_weights`); without the adaptive variant"
    )
    reads = frozenset({OLD_LOG_PROBS, ENTROPY})
    whole_batch = True

    variant: Literal["O1", "C2"] = option(
        "O1",
        "O1 raises the weight of tokens with a positive advantage; C2 also lowers that of tokens with a negative one",
    )

    threshold: float = option(
        0.3,
        "mean entropy in nats from which on every token has weight 1; greater than 0",
        gt=0,
        why="no entropy is below it, and every weight would be 1; train with adv_estimator=uniform",
    )

    share: float = option(0.1, "share of the tokens of either sign that is chosen, rounded up; in (0, 1]", gt=0, le=1)

    strength: float = option(
        0.1,
        "how far the weights of the chosen tokens are from 1; in (0, 1]",
        gt=0,
        le=1,
        why="the weights are 1 - strength, 1 and 1 + strength",
    )

    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """See :class:`grail_advantage.signals.base.Signal`. Both columns of a response must be finite."""
        return torch.where(entropy(batch).isfinite(), surprisal(batch), torch.nan)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        weights_BT = torch.ones_like(scores_BT, dtype=torch.float32)
        # Zeros elsewhere: a mean that multiplies by the mask would let NaN through.
        known_BT = torch.where(statistics_BT, entropy(batch), 0.0)
        is_low = batch.aggregate(known_BT, statistics_BT) < self.threshold
        if not is_low:
            return Reshaped(weights_BT)
        changes = {1: self.strength} if self.variant == "O1" else {1: self.strength, -1: -self.strength}
        for sign, change in changes.items():
            candidates_BT = statistics_BT & (batch.advantages_B.sign() == sign).unsqueeze(-1)
            count = count_of_share(self.share, candidates_BT.sum())
            chosen_1N = top_tokens(scores_BT.reshape(1, -1), candidates_BT.reshape(1, -1), count)
            weights_BT = torch.where(chosen_1N.reshape(scores_BT.shape), 1 + change, weights_BT)
        return Reshaped(weights_BT)
