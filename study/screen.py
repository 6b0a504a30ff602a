"""Alignment of all arms of a plan at one warmed-up model: which of them are worth training?

In the second study the gain of an arm's update before training went with its accuracy after it. A screen for arms, no result:
a tuning seed's model, a few rollout batches.
"""

from __future__ import annotations

from pathlib import Path

import torch

from recipe.marked_text import table
from study import alignment
from study.arms import ARMS
from study.plan import NO_ARM, Job, StudyPlan
from study.results import BASELINE
from study.tables import ABSENT
from study.task import study_tokenizer
from study.work import do, load_model, problems_of, settings_digest

BATCHES = 4
YARDSTICK_PROBLEMS = 512


def screen(plan: StudyPlan, models: Path, name: str, seed: int) -> list[str]:
    """A Markdown table of all main and added arms of a regime, from the largest gain down.

    Args:
        plan: a study's.
        models: folder of the warmed-up models; one that is not there is made.
        name: of the regime.
        seed: of the warm-up and of all random numbers.
    """
    torch.set_num_threads(1)
    regime = plan.regime(name)
    folder = models / f"{regime.name}-seed{seed}-{settings_digest(plan, 'start')}"
    if not folder.is_dir():
        do(plan, Job("start", regime.name, NO_ARM, seed), folder)
    training, _ = problems_of(regime.name, plan.train_size, plan.held_out_size, seed)
    by_arm = alignment.measure(
        load_model(folder),
        study_tokenizer(),
        training,
        plan.arms(regime),
        plan.run,
        batches=BATCHES,
        yardstick_problems=YARDSTICK_PROBLEMS,
        seed=seed,
    )
    base = by_arm[BASELINE]["gain"]
    rows = [
        [
            ARMS[arm].label,
            f"{row['gain'] / base:.2f}" if base else ABSENT,
            *(f"{row[name]:.3f}" for name in alignment.FIGURES),
        ]
        for arm, row in sorted(by_arm.items(), key=lambda entry: -entry[1]["gain"])
    ]
    title = f"{regime.name}, warm-up of seed {seed}, {BATCHES} batches, {YARDSTICK_PROBLEMS} problems; no interval, a screen."
    head = ["before training", "gain over uniform's", *(name.replace("_", " ") for name in alignment.FIGURES)]
    return [title, "", *table(head, rows, right=1)]
