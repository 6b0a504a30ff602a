"""The second study's finished jobs, and its comparisons."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from study.plan import BOUND, CONTRASTS, RegimePlan, StudyPlan
from study.statistics import Paired, equivalence_p, holm, paired, two_way_bootstrap
from study.work import Files, finished, total_hours

BASELINE = "uniform"
Row = Mapping[str, str]


@dataclass(frozen=True)
class Contrast:
    """Arm minus reference in the outcome of one regime, in shares."""

    arm: str
    reference: str
    seeds: tuple[int, ...]
    planned: int
    paired: Paired
    equivalence: float
    """p-value of the difference lying beyond the bound."""
    by_problem: np.ndarray = field(repr=False, compare=False)
    """Differences of every seed and problem, (S, P)."""

    @cached_property
    def both_ways(self) -> tuple[float, float]:
        """95 % interval over seeds and problems."""
        return two_way_bootstrap(self.by_problem)

    @property
    def above(self) -> int:
        """Seeds on which the arm is above the reference."""
        return int((self.by_problem.mean(axis=1) > 0).sum())

    @property
    def complete(self) -> bool:
        """Whether all planned seeds are there."""
        return len(self.seeds) == self.planned


@dataclass(frozen=True)
class Results:
    """All finished jobs of a plan."""

    plan: StudyPlan
    rows: dict[str, list[Row]]
    """By kind of job."""
    hours: dict[str, float]
    selections: list[Row] = field(default_factory=list)
    """Figures of hard selections, see :mod:`study.selections`."""

    @classmethod
    def read(cls, plan: StudyPlan, files: Files) -> Results:
        """From the raw files."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for job_rows in finished(files, plan).values():
            rows[job_rows[0]["kind"]] += job_rows
        return cls(plan, rows, total_hours(files), list(files.selections.read()))

    def runs(self, kind: str, regime: str, arm: str) -> dict[int, Row]:
        """Runs of one arm by seed."""
        return {int(row["seed"]): row for row in self.rows[kind] if (row["regime"], row["arm"]) == (regime, arm)}

    def complete(self, regime: RegimePlan, arm: str) -> bool:
        """Whether all of a main arm's planned seeds are there."""
        return self.runs("main", regime.name, arm).keys() >= set(regime.main_seeds)

    def rate(self, regime: RegimePlan, arm: str) -> float:
        """The learning rate of a main arm's runs; nan without any."""
        return next((float(row["rate"]) for row in self.runs("main", regime.name, arm).values()), math.nan)

    def contrast(self, regime: RegimePlan, arm: str, reference: str, kind: str = "main") -> Contrast | None:
        """Arm minus reference over the seeds of both; ``None`` where there is none. A side arm's reference is a main
        arm."""
        own, other = self.runs(kind, regime.name, arm), self.runs("main", regime.name, reference)
        seeds = sorted(own.keys() & other.keys())
        if not seeds:
            return None
        by_problem = np.stack([outcome(own[seed], self.plan) - outcome(other[seed], self.plan) for seed in seeds])
        by_seed = by_problem.mean(axis=1)
        return Contrast(
            arm,
            reference,
            tuple(seeds),
            len(regime.main_seeds if kind == "main" else regime.side_seeds),
            paired(by_seed.tolist()),
            equivalence_p(by_seed.tolist(), BOUND),
            by_problem,
        )

    def starts(self, regime: RegimePlan, seeds: Sequence[int], figure: str) -> list[float]:
        """A figure of the warmed-up models of these seeds."""
        rows = self.rows["start"]
        return [float(row[figure]) for row in rows if row["regime"] == regime.name and int(row["seed"]) in seeds]

    def against_baseline(self, regime: RegimePlan) -> list[Contrast]:
        """The main arms whose planned seeds are all there, each minus the baseline."""
        contrasts = [
            self.contrast(regime, arm.name, BASELINE) for arm in self.plan.arms(regime) if arm.name != BASELINE
        ]
        return [contrast for contrast in contrasts if contrast is not None and contrast.complete]


def outcome(row: Row, plan: StudyPlan) -> np.ndarray:
    """The outcome on every held-out problem: share of right samples, mean over the evaluations, (P,)."""
    right = [[int(digit) for digit in row[name]] for name in ("right_1", "right_2")]
    return np.mean(right, axis=0) / plan.run.samples


def compared(results: Results) -> list[tuple[Contrast, float]]:
    """The plan's comparisons with their corrected p-values; none before all of their seeds are there."""
    contrasts = [results.contrast(results.plan.regimes[0], *contrast) for contrast in CONTRASTS]
    complete = [contrast for contrast in contrasts if contrast is not None and contrast.complete]
    if len(complete) < len(CONTRASTS):
        return []
    return list(zip(complete, holm([contrast.paired.p for contrast in complete]), strict=True))
