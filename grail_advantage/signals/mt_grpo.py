"""MT-GRPO: the first turn is credited with what its call earned, all turns with the outcome; each normalised over the group.

By its authors' code (``MTGRPOEnvTrainer._assign_advantages`` with ``advantage_est="aae"``). A response has a turn reward T, 0
without a call, and an outcome O; ``norm`` takes the mean over *all* responses to the prompt off and divides by the deviation
plus 1e-4. A response with a call gets ``norm(O) + alpha norm(T)`` in its first turn and ``norm(O)`` in the others; one without
``norm(T + O)``. Here T is the sum of the rewards by turn but the last turn's, which counts with the outcome.

The code is for one call. With several, later turns learn nothing of what they earn: without the deviation, at ``alpha=1``, the
expected gradient is ``(1 - 1/n) (grad E[O] + E[T grad log pi(first turn)])`` for n responses. So it is the true one up to
scale where only the first turn may call, whether or not the policy decides to (``docs/turns.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Deviation, Turns, TurnSignal, compare

EPSILON = 1e-4
"""Added to a deviation."""


@register_signal("mt_grpo")
class MtGrpo(TurnSignal):
    """Biased where later turns call too, as shown by enumeration. Responses of one turn get GRPO's advantage."""

    formula = (
        "A_1 = norm(O) + alpha norm(T), later norm(O), without a call norm(T + O); T the calls' rewards, O the outcome"
    )
    source = (
        "arXiv 2505.11821, by its authors' code (SiliangZeng/Multi-Turn-RL-Agent, "
        "`verifiers/trainers/mt_grpo_env_trainer.py`)"
    )

    alpha: float = option(1.0, "how much the rewards by turn count for the first turn; at least 0", ge=0)

    deviation: Deviation = True

    def turn_advantages(self, sessions: Sequence[Turns]) -> list[np.ndarray]:
        earned = [float(session.rewards_K[:-1].sum()) for session in sessions]
        outcomes = [session.rewards_K[-1] + (session.outcome if self.outcome else 0.0) for session in sessions]
        turn, outcome, both = (
            self._normalised(values) for values in (earned, outcomes, np.add(earned, outcomes).tolist())
        )
        advantages = []
        for place, session in enumerate(sessions):
            of_turns_K = np.full(len(session.rewards_K), outcome[place])
            of_turns_K[0] = outcome[place] + self.alpha * turn[place] if len(of_turns_K) > 1 else both[place]
            advantages.append(of_turns_K)
        return advantages

    def _normalised(self, values: Sequence[float]) -> list[float]:
        each, alike = [np.array([value]) for value in values], [["response"]] * len(values)
        return [float(value) for (value,) in compare(each, alike, deviation=self.deviation, epsilon=EPSILON)]
