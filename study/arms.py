"""The arms of the study: what distinguishes one from another, and nothing else.

The base of every arm is the published set-up: advantages not divided by the group's standard deviation, token sum over a
constant length (Dr.GRPO). ``grpo_std`` is GRPO as verl ships it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grail_advantage import GrailConfig, OarConfig


@dataclass(frozen=True)
class Arm:
    """One way to assign credit."""

    name: str
    label: str
    """For people."""
    group: Literal["main", "control", "baseline", "ablation"]
    weights: GrailConfig | OarConfig | None = None
    control: Literal["shuffled", "oracle"] | None = None
    """``shuffled``: the method's weights on other tokens of the same response. ``oracle``: weights by one who knows the
    step that went wrong."""
    advantage: Literal["dr_grpo", "grpo", "optimal_token_baseline"] = "dr_grpo"
    loss_agg_mode: str = "seq-mean-token-sum-norm"
    seeds: int = 2
    """How many of the study's seeds it runs on; with fewer than five the report draws no conclusion."""


def _ablation(name: str, label: str, **changes: object) -> Arm:
    return Arm(f"official_{name}", f"official, {label}", "ablation", GrailConfig(preset="official", **changes))


_MAIN_SEEDS = 5

ARMS = (
    Arm("grpo", "GRPO", "main", seeds=_MAIN_SEEDS),
    Arm("grail_official", "GRAIL official", "main", GrailConfig(preset="official"), seeds=_MAIN_SEEDS),
    Arm("grail_robust", "GRAIL robust", "main", GrailConfig(preset="robust"), seeds=_MAIN_SEEDS),
    Arm("oar_g", "OAR-G", "main", OarConfig(method="gradient"), seeds=_MAIN_SEEDS),
    Arm(
        "shuffled",
        "GRAIL official, weights shuffled",
        "control",
        GrailConfig(preset="official"),
        control="shuffled",
        seeds=_MAIN_SEEDS,
    ),
    Arm("oracle", "oracle: weight on the true error", "control", control="oracle", seeds=_MAIN_SEEDS),
    _ablation("content_1", "content weight 1", content_weight=1.0),
    _ablation("gate_all", "gate all", gate="all"),
    _ablation("gate_correct", "gate correct", gate="correct"),
    _ablation("reasoning", "statistics over the reasoning", statistics="reasoning"),
    _ablation("token", "alignment token", alignment="token"),
    _ablation("last", "leaf last", leaf="last"),
    Arm("grpo_std", "GRPO as verl ships it", "baseline", advantage="grpo", loss_agg_mode="token-mean"),
    Arm("otb", "optimal token baseline", "baseline", advantage="optimal_token_baseline"),
)
