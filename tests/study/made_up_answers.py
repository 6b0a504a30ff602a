"""Jobs in processes of their own whose answers are right at random: an untrained model has none, and would learn nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from study import trainer, work
from study.plan import Job, StudyPlan

_do = work.do


def do(plan: StudyPlan, job: Job, folder: Path) -> list[dict[str, Any]]:
    """In place of :func:`study.work.do`."""
    trainer.is_right = lambda tokenizer, problem, response: sum(response) % 2 == 0  # type: ignore[assignment]
    return _do(plan, job, folder)
