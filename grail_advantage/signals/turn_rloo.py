"""Leave-one-out credit by turn: a turn's return less the mean return of the siblings' turns at the same place.

``A_k = G_k - b_k``. The return ``G_k`` is the discounted sum of the rewards from turn k on. The baseline ``b_k`` is the mean of
``G_k`` over the other responses to the prompt that have a turn k; where none has, that of their first turns. The baseline reads
the siblings alone, so it does not depend on what the response itself chose, such as when to stop. Nothing is divided by a
deviation. The expected gradient is thus that of the mean return, whatever decides the number of turns, at ``gamma=1`` and with
a loss that divides by a constant, such as ``seq-mean-token-sum-norm`` (``docs/turns.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Gamma, Turns, TurnSignal


@register_signal("turn_rloo")
class TurnRloo(TurnSignal):
    """Unbiased, as shown by enumeration. Responses of one turn get RLOO's advantage."""

    formula = "A_k = G_k - mean of G_k over the siblings with a turn k, G_k the return from turn k on"
    source = "this project; verl#7244 describes the bias that it avoids"

    gamma: Gamma = 1.0

    def turn_advantages(self, responses: Sequence[Turns]) -> list[np.ndarray]:
        returns = [response.returns_K(self.gamma, outcome=self.outcome) for response in responses]
        return [
            returns_K - baseline(len(returns_K), returns[:place] + returns[place + 1 :])
            for place, returns_K in enumerate(returns)
        ]


def baseline(turns: int, siblings: Sequence[np.ndarray]) -> np.ndarray:
    """The baselines of a response's turns, float64 (K,); 0 without siblings."""
    first = float(np.mean([returns_K[0] for returns_K in siblings])) if siblings else 0.0
    at_turn = [[returns_K[turn] for returns_K in siblings if len(returns_K) > turn] for turn in range(turns)]
    return np.array([np.mean(of) if of else first for of in at_turn])
