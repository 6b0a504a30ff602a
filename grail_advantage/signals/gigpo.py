"""GiGPO: the response's advantage, plus that of a turn among the turns that began from the same observation.

``A_k = A^E + omega A_k^S``. ``A^E`` compares the sum of a response's rewards with the other responses to the prompt, as GRPO
does; ``A_k^S`` compares the discounted return of turn k with those of all turns of the group before which a tool or a user said
the same, wherever they are. First turns follow the same prompt. A turn whose observation no other one shares has ``A_k^S``
0. Observations are the same where their token ids are.

Its authors' code differs in four ways. An observation there is the environment's alone, and may be the first one again; here
it is the message before the turn. It groups similar texts, if asked. A group of one session keeps its raw score as ``A^E``;
here it has 0. Its ``run_search.sh`` counts a session in the group's mean and deviation once for each of its turns
(``group_by_agent_id``), which moves ``A^E`` towards long sessions, and punishes invalid calls in the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grail_advantage.batch import MESSAGES
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Deviation, Gamma, Turns, TurnSignal, compare


@register_signal("gigpo")
class Gigpo(TurnSignal):
    """Biased where the policy decides when to stop, as shown by enumeration: without the deviation, the parts of turns after
    rare observations are shrunk. Responses of one turn get ``1 + omega`` times GRPO's advantage.
    """

    formula = "A_k = A + omega (G_k - mean) / deviation, over the group's turns after the same observation"
    source = (
        "arXiv 2505.10978, by its authors' code (langfengQ/DrMAS at 3b556f2, `gigpo/core_gigpo.py`, which names equations 3 "
        "and 5 to 8 of the paper, later in `verl/trainer/ppo/core_algos.py`; defaults of its "
        "`examples/gigpo_trainer/run_search.sh`)"
    )
    reads = TurnSignal.reads | {MESSAGES}

    omega: float = option(1.0, "how much the comparison after the same observation counts; at least 0", ge=0)

    gamma: Gamma = 0.95

    deviation: Deviation = True

    def turn_advantages(self, sessions: Sequence[Turns]) -> list[np.ndarray]:
        returns = [session.returns_K(self.gamma, outcome=self.outcome) for session in sessions]
        sums = [session.returns_K(1.0, outcome=self.outcome)[:1] for session in sessions]
        episodes = compare(sums, [["session"]] * len(sessions), deviation=self.deviation)
        steps = compare(returns, [session.before for session in sessions], deviation=self.deviation)
        return [episode + self.omega * step_K for episode, step_K in zip(episodes, steps, strict=True)]
