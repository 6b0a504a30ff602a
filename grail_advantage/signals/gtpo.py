"""GTPO: a turn's discounted return, normalised over the turns at the same place.

``A_k`` is the return of turn k less the mean over the sessions of the prompt that have a turn k, divided by the deviation. The
mean holds the session's own return. Without the deviation each turn's part of the gradient is therefore shrunk by
``1 - c_k``, where ``c_k = (1 - (1 - p_k)^n) / (n p_k)`` for n sessions that reach turn k with probability ``p_k``: by
``1 - 1/n`` at the first turn, by more where few sessions come (``docs/turns.md``).

The abstract says only "normalized discounted returns"; the turns to normalise over are chosen here. The paper's
rewards from the similarity of code are not built; ``rewards`` takes any rewards by turn. The outcome counts with the last turn,
as for the other methods here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Deviation, Gamma, Turns, TurnSignal, compare


@register_signal("gtpo")
class Gtpo(TurnSignal):
    """Biased where the policy decides when to stop, as shown by enumeration. Responses of one turn get GRPO's advantage.

    A turn that no other session has gets 0.
    """

    formula = "A_k = (G_k - mean) / deviation, G_k the discounted return, over the group's sessions with a turn k"
    source = (
        "arXiv 2511.14846, of which the abstract was read; the formula and gamma are those of a published summary of arXiv "
        "2604.02869 (there equation 2), the comparison by place is chosen here"
    )

    gamma: Gamma = 0.9

    deviation: Deviation = True

    def turn_advantages(self, sessions: Sequence[Turns]) -> list[np.ndarray]:
        returns = [session.returns_K(self.gamma, outcome=self.outcome) for session in sessions]
        return compare(returns, [range(len(returns_K)) for returns_K in returns], deviation=self.deviation)
