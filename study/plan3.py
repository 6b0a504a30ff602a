"""The third study's jobs, comparisons and rules; ``docs/study3/PLAN.md`` has the reasons."""

from __future__ import annotations

from study.arms import ADDED_3, PRIMARY_3, SIDE_3
from study.plan import RegimePlan, StudyPlan

CONTRASTS_3 = (
    ("results_mask", "right_only"),
    ("oracle", "results_mask"),
    ("error_place", "random_token"),
    ("step_values", "right_only"),
)
"""Arm minus reference; Holm's correction over all four."""
SMALL = 0.02
"""Of the oracle above the mask, less than this decides against anything finer than token type."""

THIRD = StudyPlan(
    regimes=(
        RegimePlan(
            "misconceptions",
            main_seeds=tuple(range(15, 29)),
            tuning_seeds=(2001, 2002),
            measured_seeds=(15, 16, 17),
            added=ADDED_3,
            side_seeds=tuple(range(15, 21)),
            together=tuple(arm.name for arm in PRIMARY_3),
        ),
        RegimePlan(
            "choices",
            main_seeds=tuple(range(1, 7)),
            tuning_seeds=(2001,),
            measured_seeds=(),
            together=tuple(arm.name for arm in PRIMARY_3),
        ),
    ),
    rates=(1e-4, 2e-4, 4e-4),
    pilot_arms=(),
    main_arms=PRIMARY_3,
    side_arms=SIDE_3,
    measurements=("alignment",),
    tuned_alike=True,
    hours=10.0,
)
