"""Leave-one-out credit by turn: a turn's return less the mean return of the siblings' turns at the same place.

``A_k = G_k - b_k``. The return ``G_k`` is the discounted sum of the rewards from turn k on. The baseline ``b_k`` is the mean
of ``G_k`` over the other sessions of the prompt that have a turn k; where none has, that of their first turns. With
``stopped=zero`` it is the mean over all of them, with 0 for a session without a turn k, which earns nothing more.

Either baseline reads only the siblings, so it does not depend on the session's own choices, such as when to stop: it takes
``E[b_k grad log pi(turn k)] = E[b_k] E[grad log pi(turn k)] = 0`` from the gradient. Nothing is divided by a deviation. The
expected gradient is thus that of the mean return, whatever decides the number of turns, at ``gamma=1`` and with a loss that
divides by a constant, such as ``seq-mean-token-sum-norm`` (``docs/turns.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.turns import Gamma, Turns, TurnSignal

ROUNDING = 1e-13
"""Part of the largest return below which an advantage is rounding: siblings with the same returns have 0, and are left out."""


@register_signal("turn_rloo")
class TurnRloo(TurnSignal):
    """Unbiased, as shown by enumeration. Responses of one turn get RLOO's advantage."""

    formula = "A_k = G_k - mean of G_k over the siblings with a turn k, G_k the return from turn k on"
    source = "this project; verl#7244 describes the bias that it avoids"

    gamma: Gamma = 1.0

    stopped: Literal["left_out", "zero"] = option(
        "left_out",
        "siblings that have stopped before a turn: left_out of its mean, or counted as zero, since they earn nothing more; "
        "both are unbiased",
    )

    def turn_advantages(self, sessions: Sequence[Turns]) -> list[np.ndarray]:
        returns = [session.returns_K(self.gamma, outcome=self.outcome) for session in sessions]
        return leave_one_out(returns, zero=self.stopped == "zero")


def leave_one_out(returns: Sequence[np.ndarray], *, zero: bool) -> list[np.ndarray]:
    """Returns less their baselines, float64 (K,) each; the returns themselves without siblings.

    Args:
        returns: of the turns of each session.
        zero: whether a session without a turn counts as 0 there.
    """
    siblings, longest = len(returns) - 1, max(map(len, returns))
    padded_NK = np.array([np.pad(returns_K, (0, longest - len(returns_K))) for returns_K in returns])
    counts_K = np.array([[turn < len(returns_K) for turn in range(longest)] for returns_K in returns]).sum(axis=0) - 1
    sums_NK = padded_NK.sum(axis=0) - padded_NK
    firsts_N1 = sums_NK[:, :1] / max(1, siblings)
    means_NK = sums_NK / max(1, siblings) if zero else np.where(counts_K > 0, sums_NK / counts_K.clip(min=1), firsts_N1)
    advantages_NK = padded_NK - means_NK
    advantages_NK[abs(advantages_NK) <= ROUNDING * abs(padded_NK).max()] = 0.0
    return [advantages_NK[place, : len(returns_K)] for place, returns_K in enumerate(returns)]
