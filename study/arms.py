"""The arms of the study: a registered method with options, or one of the study's own controls, and nothing else.

The base of every arm is the published set-up: advantages not divided by the group's standard deviation, token sum over a
constant length (Dr. GRPO), truncated responses without advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grail_advantage.methods import method
from grail_advantage.signals.base import Signal
from grail_advantage.signals.rlsd import PLACE

Control = Literal[
    "right_only",
    "shuffled",
    "random_token",
    "last_result",
    "spread",
    "error_place",
    "oracle",
    "oracle_by_step",
    "oracle_mixed",
    "regression",
]


@dataclass(frozen=True)
class Arm:
    """One way to assign credit."""

    name: str
    label: str
    """For people."""
    method: str = "uniform"
    """A registered method."""
    options: Mapping[str, Any] = field(default_factory=dict)
    control: Control | None = None
    """``right_only``: wrong rows weigh 0. ``shuffled``: the method's weights on other tokens of the same kind of the same
    response, the answer's apart. ``random_token``, ``last_result``: a random token, or the first digit of the last result, in
    place of the token that the method picks by score. ``spread``: of every row that the method weighs, weights of sum 1.
    ``error_place``: of wrong rows the first wrong token weighs 1, all else 0. ``oracle``: the exact token
    advantage; ``oracle_by_step``: its sum over a step on each of the step's tokens; ``oracle_mixed``: 0 in groups with one
    outcome. ``regression``: :mod:`study.regression`."""
    advantage: Literal["dr_grpo", "grpo"] = "dr_grpo"
    """``grpo``: divided by the group's standard deviation."""
    loss_agg_mode: str = "seq-mean-token-sum-norm"
    rollouts: int = 0
    """Responses a problem; 0 as the study's settings have it."""
    rate_of: str = "uniform"
    """The arm whose learning rate a side arm takes."""

    @property
    def signal(self) -> Signal:
        """The method with its options."""
        return method(self.method).build(self.options)


MAIN = (
    Arm("uniform", "uniform (Dr. GRPO)"),
    Arm("right_only", "right rows only", control="right_only"),
    Arm("grail", "GRAIL, as published", "grail"),
    Arm("grail_robust", "GRAIL, preset robust", "grail", {"preset": "robust"}),
    Arm("oar_g", "OAR-G", "oar_g"),
    Arm("oar_g_port", "OAR-G, GRAIL's authors' variant", "oar_g", {"variant": "grail_port"}),
    Arm("grail_shuffled", "GRAIL's weights, shuffled within token type", "grail", control="shuffled"),
    Arm("surprisal", "wrong rows: least likely token", "surprisal"),
    Arm("random_token", "wrong rows: a random token", "surprisal", control="random_token"),
    Arm("last_result", "wrong rows: last result", "surprisal", control="last_result"),
    Arm("oracle", "exact token advantage (oracle)", control="oracle"),
)
"""Compared in every regime, each at a learning rate of its own."""

ADDED = (
    Arm(
        "spread",
        "wrong rows: one token's weight, spread evenly",
        "surprisal",
        {"reshaper_options": {"share": 1.0}},
        control="spread",
    ),
)
"""Like the main arms, in the first regime alone: what a random token does on average, without its noise."""

SIDE = (
    Arm("grpo_verl", "GRPO: divided by deviation, token mean", advantage="grpo", loss_agg_mode="token-mean"),
    Arm("entropy", "entropy", "entropy"),
    Arm("high_entropy", "high entropy (80/20)", "high_entropy"),
    Arm("entropy_bonus", "entropy bonus", "entropy_bonus"),
    Arm("probability", "probability", "probability"),
    Arm("stare", "STARE", "stare"),
    Arm("surprisal_smooth", "surprisal, smooth, all rows", "surprisal", {"reshaper": "log_zscore", "gate": "all"}),
    Arm("oar_p", "OAR-P", "oar_p"),
    # The tiny model has never read English: the request is the answer alone.
    Arm("rlsd", "RLSD", "rlsd", {"request": PLACE}),
    # Responses are some 60 tokens long; the default window of 100 would hold them whole.
    Arm("shear", "SHEAR, window 16", "shear", {"window": 16, "stride": 4}),
    Arm("regression", "regression, falling back to uniform", control="regression"),
)
"""Fewer seeds, in the first regime, at the learning rate of ``uniform``."""

# The third study: of what is the oracle's gain made, and what of it can be had?
STEP_END = ";"
RESULTS = {"expression": rf"=(?P<content>-?\d+){STEP_END}"}
"""Digits of steps' results; those of asides end with a bracket."""
_SECOND = {arm.name: arm for arm in MAIN}
PRIMARY_3 = (
    _SECOND["uniform"],
    _SECOND["right_only"],
    Arm("results_mask", "right rows: digits of results alone", "pattern", RESULTS),
    _SECOND["oracle"],
    Arm("error_place", "wrong rows: the first wrong token", control="error_place"),
    _SECOND["random_token"],
    Arm("step_values", "step values of the siblings", "step_values", {"separator": STEP_END}),
)
"""The arms of the primary comparisons, and the baseline."""

ADDED_3 = (
    Arm("random_mask", "right rows: as many random tokens", "pattern", {**RESULTS, "control": True}),
    Arm(
        "mask_and_error",
        "right rows: results; wrong rows: the first wrong token",
        "pattern",
        RESULTS,
        control="error_place",
    ),
    Arm("oracle_by_step", "oracle, summed over steps", control="oracle_by_step"),
    Arm("oracle_mixed", "oracle on groups of both outcomes", control="oracle_mixed"),
)
"""In the first regime alone."""

SIDE_3 = (
    Arm("uniform_24", "uniform, 24 rollouts", rollouts=24),
    Arm("right_only_24", "right rows only, 24 rollouts", control="right_only", rollouts=24, rate_of="right_only"),
)
"""The price of generation: three times the rollouts."""

ARMS = {arm.name: arm for arm in (*MAIN, *ADDED, *SIDE, *PRIMARY_3, *ADDED_3, *SIDE_3)}
