"""The methods by turn of this package, see :mod:`grail_advantage.methods.sessions`."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, Literal

import numpy as np

from grail_advantage.method import option, register
from grail_advantage.methods.sessions import Session, TurnMethod

GAMMA = "discount from one turn to the next"
DEVIATION = "whether differences from a mean are divided by the deviation, as in GRPO"


def compare(
    values: Sequence[np.ndarray],
    keys: Sequence[Sequence[Any]],
    *,
    deviation: bool,
    epsilon: float = 1e-6,
) -> list[np.ndarray]:
    """Values (K,) of each session's turns less the mean of those with the same key, 0 for a key of one turn; with
    ``deviation`` divided by the deviation, with n - 1, plus ``epsilon``, as verl's GRPO does it."""
    numbers = np.concatenate(values)
    places: dict[Any, list[int]] = defaultdict(list)
    for place, key in enumerate(chain(*keys)):
        places[key].append(place)
    for indices in places.values():
        of_key = numbers[indices]
        difference = of_key - np.mean(of_key)
        # One value has no deviation; its difference is 0.
        if deviation and len(of_key) > 1:
            difference = difference / (np.std(of_key, ddof=1) + epsilon)
        numbers[indices] = difference
    # Of sessions of 2, 1 and 3 turns the second begins at 2, the third at 3.
    return np.split(numbers, np.cumsum([len(of_session) for of_session in values])[:-1])


@register("turn_rloo")
class TurnRloo(TurnMethod):
    """Unbiased (docs/turns.md) at gamma=1 and with a loss that divides by a constant. A response of one turn gets RLOO's
    advantage."""

    formula = (
        "A_k = G_k - mean of G_k over the siblings with a turn k, G_k the return from turn k on"
    )
    source = "this project; verl#7244 describes the bias that it avoids"
    gamma: float = option(1.0, GAMMA, ge=0, le=1)
    stopped: Literal["left_out", "zero"] = option(
        "left_out",
        "siblings that have stopped before a turn: left out of its mean, or counted as zero; both are unbiased",
    )

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        returns = [session.returns(self.gamma, outcome=self.outcome) for session in sessions]
        # A session without siblings is compared with 0.
        siblings = max(1, len(returns) - 1)
        padded = np.stack(list(zip_longest(*returns, fillvalue=np.nan)), axis=1)
        g = np.nan_to_num(padded)
        # Less the session itself.
        counts = np.isfinite(padded).sum(axis=0) - 1
        sums = g.sum(axis=0) - g
        mean = sums / siblings
        # Where no sibling has the turn, the mean of their first ones
        if self.stopped == "left_out":
            mean = np.where(counts > 0, sums / counts.clip(min=1), mean[:, :1])
        a = g - mean
        # Rounding: siblings with the same returns have 0, and are left out
        a[abs(a) <= 1e-13 * abs(g).max()] = 0.0
        return [a[index, : len(g_K)] for index, g_K in enumerate(returns)]


@register("mt_grpo")
class MtGrpo(TurnMethod):
    """The first turn is credited with what the calls earned, all turns with the outcome. Biased where later turns call
    too. A response of one turn gets GRPO's advantage."""

    formula = "A_1 = norm(O) + alpha norm(T), later norm(O), without a call norm(T + O); T the calls' rewards, O the outcome"
    source = (
        "arXiv 2505.11821 (SiliangZeng/Multi-Turn-RL-Agent, "
        "`verifiers/trainers/mt_grpo_env_trainer.py`, `_assign_advantages` with `aae`)"
    )
    alpha: float = option(1.0, "how much the rewards by turn count for the first turn", ge=0)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        def norm(values: Sequence[np.ndarray]) -> list[np.ndarray]:
            keys = [["response"]] * len(values)
            return compare(values, keys, deviation=self.deviation, epsilon=1e-4)

        t = [s.rewards[:-1].sum(keepdims=True) for s in sessions]
        o = [s.rewards[-1:] + self.outcome * s.outcome for s in sessions]
        sums = list(map(np.add, t, o))
        advantages = []
        for s, norm_t, norm_o, norm_sum in zip(sessions, norm(t), norm(o), norm(sums), strict=True):
            a = norm_o.repeat(len(s.rewards))
            # Of a single turn rewards and outcome are one sum.
            a[:1] = norm_o + self.alpha * norm_t if len(s.rewards) > 1 else norm_sum
            advantages.append(a)
        return advantages


@register("gigpo")
class Gigpo(TurnMethod):
    """GRPO's advantage, plus that of a turn among the group's turns after the same message, by its token ids. Biased
    where the policy decides when to stop. A response of one turn gets ``1 + omega`` times GRPO's advantage. Its authors'
    code observes the environment alone, groups similar texts if asked, keeps the raw score of a group of one session,
    and counts a session once a turn in the group's mean (``run_search.sh``)."""

    formula = "A_k = A + omega (G_k - mean) / deviation, over the group's turns after the same observation"
    source = (
        "arXiv 2505.10978 (langfengQ/DrMAS at 3b556f2, `gigpo/core_gigpo.py`, equations 3 and 5 to 8; defaults: "
        "`examples/gigpo_trainer/run_search.sh`)"
    )
    reads = TurnMethod.reads | {"messages"}
    omega: float = option(1.0, "how much the comparison after the same observation counts", ge=0)
    gamma: float = option(0.95, GAMMA, ge=0, le=1)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        # Without a discount the first return is the sum of all rewards.
        sums = [s.returns(1.0, outcome=self.outcome)[:1] for s in sessions]
        episode = compare(sums, [["session"]] * len(sums), deviation=self.deviation)
        returns = [s.returns(self.gamma, outcome=self.outcome) for s in sessions]
        step = compare(returns, [s.before for s in sessions], deviation=self.deviation)
        return [
            of_session + self.omega * a_K for of_session, a_K in zip(episode, step, strict=True)
        ]


@register("turn_grpo")
class TurnGrpo(TurnMethod):
    """Biased where the policy decides when to stop: the mean holds the session's own return. A response of one turn
    gets GRPO's advantage; a turn that no other session has gets 0."""

    formula = "A_k = (G_k - mean) / deviation, G_k the discounted return, over the group's sessions with a turn k"
    source = (
        "this project: GRPO by turn, after the abstract of GTPO, arXiv 2511.14846 (the abstract alone: comparing by "
        "place, and gamma, are no claim about it)"
    )
    gamma: float = option(0.9, GAMMA, ge=0, le=1)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        returns = [s.returns(self.gamma, outcome=self.outcome) for s in sessions]
        return compare(returns, [range(len(g_K)) for g_K in returns], deviation=self.deviation)
