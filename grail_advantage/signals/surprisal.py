"""Surprisal: how improbable each drawn token was under the policy.

By default the gate and the map make a hard selection: of an incorrect response only the least probable reasoning token is held
responsible, and correct responses stay as they are.

Source: a control of this project; the repository of arXiv 2606.00257 weighs by the square of the surprisal (reshaper
``power``).

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import OLD_LOG_PROBS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import GateOption, NormalizeMass, ReshapedSignal, StatisticsOption
from grail_advantage.signals.policy_columns import surprisal


@register_signal("surprisal")
class Surprisal(ReshapedSignal):
    """Score ``-old_log_prob``, through any reshaper."""

    formula = "map of s = -log p; by default 1 on the incorrect response's reasoning token with the highest s, else 0"
    source = "control; the reshaper power: arXiv 2606.00257 (its repository, the file is not on record)"
    reads = frozenset({OLD_LOG_PROBS})

    reshaper: str = option("top", "map from scores to weights, by its registered name")

    gate: GateOption = "wrong"
    statistics: StatisticsOption = "reasoning"
    normalize_mass: NormalizeMass = False

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return surprisal(batch)
