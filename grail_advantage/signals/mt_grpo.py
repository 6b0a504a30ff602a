"""A reading of MT-GRPO for K turns: a turn's advantage sums its own reward and those after it, each normalised on its own.

It is not the method of MT-GRPO's authors. Where responses differ in their number of turns, their code
(``verifiers/trainers/mt_grpo_env_trainer.py``) gives other advantages: it normalises the turn's reward over *all* responses to
the prompt, with 0 for a response without a call, gives such a response the normalised sum of turn reward and outcome, weighs
the turn's part by ``alpha``, and adds 1e-4 to a deviation. The bias below is that of this reading alone.

``A_k = A_k^I + alpha A_(k+1)^I + ... + alpha^(K-k) A^O``. ``A_l^I`` is the reward of turn l less the mean over the responses to
the prompt for which turn l is not the last one, divided by the deviation; ``A^O`` is the same for what the last turn got, the
outcome with it, over all responses.

Each of these means has as many terms as the response chose turns. So a response loses the mean reward of every further turn
that it takes, and the expected gradient holds nothing of what reaching a turn is worth (verl#7244). Without the deviation it is
``(1 - 1/n) grad E[O] + sum of (1 - c_l) p_l grad mu_l`` over the turns l, for n responses, where ``p_l`` is the probability to
go on after turn l, ``mu_l`` the mean reward of those that do, and ``c_l = (1 - (1 - p_l)^n) / (n p_l)``. With a fixed number of
turns that is the true gradient times ``1 - 1/n`` (``docs/turns.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Deviation, Turns, TurnSignal, compare


@register_signal("mt_grpo")
class MtGrpo(TurnSignal):
    """A K-turn reading, not the authors' method. It is biased where the policy decides when to stop, as shown by enumeration.
    Responses of one turn get GRPO's advantage."""

    formula = (
        "A_k = sum over l >= k of alpha^(l-k) A_l, A_l the normalised reward of turn l, the last one's the outcome"
    )
    source = (
        "K turns by two published summaries, of arXiv 2505.11821 and of arXiv 2604.02869 (section 3.2). Not the authors' code "
        "(SiliangZeng/Multi-Turn-RL-Agent, `verifiers/trainers/mt_grpo_env_trainer.py`), which differs where the numbers of "
        "turns do"
    )

    alpha: float = option(1.0, "how much the part of each later turn counts for a turn; 0 to 1", ge=0, le=1)

    deviation: Deviation = True

    def turn_advantages(self, responses: Sequence[Turns]) -> list[np.ndarray]:
        rewards = [response.rewards_K for response in responses]
        last = [
            of[-1:] + (response.outcome if self.outcome else 0.0)
            for of, response in zip(rewards, responses, strict=True)
        ]
        parts = compare(
            [np.concatenate([of[:-1], end]) for of, end in zip(rewards, last, strict=True)],
            [[*range(len(of) - 1), "last"] for of in rewards],
            deviation=self.deviation,
        )
        for parts_K in parts:
            for turn in range(len(parts_K) - 2, -1, -1):
                parts_K[turn] += self.alpha * parts_K[turn + 1]
        return parts
