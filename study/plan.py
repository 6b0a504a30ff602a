"""The jobs of the study, their order, and its comparisons; ``docs/study2/PLAN.md`` has the reasons.

A job is one process's work on one seed: its warm-up (``start``), a training run (``pilot``, ``tune``, ``main``, ``side``), or a
measurement at its checkpoint (``alignment``, ``truth``). Everything of a regime comes before the next one: its pilot; a few
arms through tuning and all main seeds together; the measurements; every other arm in the same way, alone, so that most are
whole where the hours end; its side arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from study.arms import ADDED, MAIN, SIDE, Arm
from study.trainer import RunSettings

NO_ARM = "-"
RUNS = ("pilot", "tune", "main", "side")
MEASUREMENTS = ("alignment", "truth")
BOUND = 0.015
"""Differences of the primary outcome within this are called equivalent to none."""
CONTRASTS = (("grail", "uniform"), ("surprisal", "uniform"), ("surprisal", "random_token"))
"""Arm minus reference; corrected together."""
COMPARED = tuple(dict.fromkeys(arm for pair in CONTRASTS for arm in pair))
"""The arms of these."""


@dataclass(frozen=True, order=True)
class Job:
    """One piece of work."""

    kind: str
    regime: str
    arm: str
    seed: int
    rate: float = 0.0
    """Learning rate of a run."""

    @property
    def key(self) -> tuple[str, ...]:
        """As in its row."""
        return self.kind, self.regime, self.arm, str(self.seed), repr(self.rate)


@dataclass(frozen=True)
class RegimePlan:
    """Seeds of one regime; those of the pilot and of tuning are used for nothing else, and the pilot's runs on seeds of both
    count for tuning too."""

    name: str
    main_seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    measured_seeds: tuple[int, ...]
    """Of the main seeds, those at whose checkpoints alignment and ground truth are measured."""
    added: tuple[Arm, ...] = ()
    """Arms beside the main ones, treated like them."""
    side_seeds: tuple[int, ...] = ()
    pilot_seeds: tuple[int, ...] = ()
    together: tuple[str, ...] = COMPARED
    """Arms that go through the seeds first, together; every other one follows alone."""


@dataclass(frozen=True)
class StudyPlan:
    """The whole study."""

    regimes: tuple[RegimePlan, ...] = (
        RegimePlan(
            "misconceptions",
            main_seeds=tuple(range(1, 15)),
            tuning_seeds=(2001, 2002),
            measured_seeds=(1, 2, 3),
            added=ADDED,
            side_seeds=(1, 2),
            pilot_seeds=(2001, 2002, 2003),
        ),
        RegimePlan("slips", tuple(range(1, 11)), (1001,), (1, 2)),
        RegimePlan("distractors", tuple(range(1, 7)), (1001,), (1, 2), together=("uniform", "grail")),
    )
    rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    """Tried for every main arm in every regime."""
    pilot_rate: float = 1e-4
    pilot_arms: tuple[str, ...] = ("uniform", "grail", "surprisal", "random_token")
    main_arms: tuple[Arm, ...] = MAIN
    side_arms: tuple[Arm, ...] = SIDE
    measurements: tuple[str, ...] = MEASUREMENTS
    tuned_alike: bool = False
    """Whether all arms are tuned on all tuning seeds; else only those that are compared."""
    run: RunSettings = field(default_factory=RunSettings)
    warm_up_steps: int = 1000
    warm_up_batch: int = 32
    """Written solutions a step of the warm-up."""
    warm_up_rate: float = 3e-3
    hours: float = 12.0
    """Processor time of all jobs together; none begins that would exceed it."""
    train_size: int = 4096
    held_out_size: int = 256
    wordings: int = 1
    """Right solutions of each held-out problem for the exact accuracy."""
    batches: int = 16
    """Rollout batches of an alignment measurement."""
    yardstick_problems: int = 1024
    judged: int = 200
    """At most so many wrong, and so many right, responses of a ground-truth measurement."""

    def jobs(self, rates: Mapping[tuple[str, str], float]) -> Iterator[Job]:
        """All jobs in their order. A main or side run whose learning rate is not known yet comes with rate 0.

        Args:
            rates: the tuned learning rate by regime and arm.
        """
        for regime in self.regimes:
            begun: set[int] = set()
            for job in self._runs(regime, rates):
                if job.seed not in begun:
                    begun.add(job.seed)
                    yield Job("start", regime.name, NO_ARM, job.seed)
                yield job

    def _runs(self, regime: RegimePlan, rates: Mapping[tuple[str, str], float]) -> Iterator[Job]:
        """Everything of a regime but its warm-ups."""
        for seed in regime.pilot_seeds:
            yield from (Job("pilot", regime.name, arm, seed, self.pilot_rate) for arm in self.pilot_arms)
        passes = self.passes(regime)
        for arms in passes:
            for seed in regime.tuning_seeds:
                for arm in arms:
                    if seed not in self.tuning_seeds(regime, arm):
                        continue
                    yield from (
                        Job("tune", regime.name, arm.name, seed, rate)
                        for rate in self.rates
                        if not self._is_pilot(regime, arm, seed, rate)
                    )
            for seed in regime.main_seeds:
                for arm in arms:
                    yield Job("main", regime.name, arm.name, seed, rates.get((regime.name, arm.name), 0.0))
            if arms is passes[0]:
                yield from (
                    Job(kind, regime.name, NO_ARM, seed) for seed in regime.measured_seeds for kind in self.measurements
                )
        for seed in regime.side_seeds:
            for arm in self.side_arms:
                yield Job("side", regime.name, arm.name, seed, rates.get((regime.name, arm.rate_of), 0.0))

    def passes(self, regime: RegimePlan) -> list[tuple[Arm, ...]]:
        """Main arms in the order of their passes over the seeds: some together, then every other one alone, first those that
        are compared or were added."""
        first = tuple(arm for arm in self.main_arms if arm.name in regime.together)
        alone = [arm for arm in (*regime.added, *self.main_arms) if arm not in first]
        alone.sort(key=lambda arm: not (arm.name in COMPARED or arm in regime.added))
        return [first, *((arm,) for arm in alone)]

    def arms(self, regime: RegimePlan) -> tuple[Arm, ...]:
        """All that run on the regime's main seeds."""
        return (*self.main_arms, *regime.added)

    def tuning_seeds(self, regime: RegimePlan, arm: Arm) -> tuple[int, ...]:
        """All of the regime's where all are tuned alike, and for the arms that are compared; the first one for the others."""
        return regime.tuning_seeds if self.tuned_alike or arm.name in COMPARED else regime.tuning_seeds[:1]

    def _is_pilot(self, regime: RegimePlan, arm: Arm, seed: int, rate: float) -> bool:
        """Whether a run for tuning is one that the pilot makes."""
        return seed in regime.pilot_seeds and arm.name in self.pilot_arms and rate == self.pilot_rate

    def tuned_rates(self, rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], float]:
        """The learning rate of the highest mean outcome over the tuning seeds, of equal ones the lowest, by regime and arm;
        only where all tuning runs are there."""
        accuracy = {
            (row["regime"], row["arm"], row["seed"], row["rate"]): float(row["accuracy"])
            for row in rows
            if row["kind"] in ("tune", "pilot")
        }
        tuned = {}
        for regime in self.regimes:
            for arm in self.arms(regime):
                means = []
                for rate in self.rates:
                    seeds = self.tuning_seeds(regime, arm)
                    keys = [(regime.name, arm.name, str(seed), repr(rate)) for seed in seeds]
                    if all(key in accuracy for key in keys):
                        means.append((-fmean(accuracy[key] for key in keys), rate))
                if len(means) == len(self.rates):
                    tuned[regime.name, arm.name] = min(means)[1]
        return tuned

    def regime(self, name: str) -> RegimePlan:
        """By its name."""
        return next(regime for regime in self.regimes if regime.name == name)
