"""Entropy: how undecided the policy was where it drew each token.

Source: a control of this project, for methods that weigh by what a token does to the answer.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import ENTROPY, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import GateOption, NormalizeMass, ReshapedSignal, StatisticsOption
from grail_advantage.signals.policy_columns import entropy


@register_signal("entropy")
class Entropy(ReshapedSignal):
    """Score ``H``, through any reshaper. The default one keeps each response's mean weight at 1 and ranks nothing."""

    formula = "map of H; by default 1 + 0.1 (H / response mean - 1)"
    source = "control"
    reads = frozenset({ENTROPY})

    reshaper: str = option("mean_ratio", "map from scores to weights, by its registered name")

    gate: GateOption = "all"
    statistics: StatisticsOption = "response"
    normalize_mass: NormalizeMass = False

    @property
    def ranks_entropy(self) -> bool:  # type: ignore[override]
        return self.reshaping.ranks

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return entropy(batch)
