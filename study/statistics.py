"""What the runs of a study say: figures of each run, and paired differences between arms over the same seeds.

A run is one file ``<arm>-seed<k>.json``, written by the study's trainer. Definitions:

- final accuracy and final pass@3: mean of the last two evaluations after step 0, which halves the noise of sampling;
- area: area under the accuracy curve (trapezoids) divided by the steps it spans, so the mean accuracy while training;
- steps to an accuracy: linear interpolation between evaluations; ``None`` for a run that never got there. Their mean is a
  restricted one: a run that never got there counts as the last step that all runs have, and is counted beside it;
- response length and entropy at the end: mean of the last ten steps;
- seconds a step: median.

A difference between two arms is the mean over seeds of the difference within a seed. Its 95 % interval is a percentile
bootstrap over seeds, widened for their small number; :func:`false_alarm_rate` says how far it can be trusted all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from recipe.evaluate.bootstrap import LEVEL, SEED, resample_counts

BASELINE = "grpo"
LAST_EVALUATIONS = 2
LAST_STEPS = 10
TARGET_SHARE = 0.8
MAX_EXACT_SEEDS = 16
_ROUNDING = 1e-9
_RUN_KEYS = ("arm", "seed", "group", "steps", "evaluations")


@dataclass(frozen=True)
class Run:
    """One training run as its file holds it."""

    arm: str
    label: str
    """Name for people; the arm's name where the file has none."""
    group: str
    """``baseline``, ``main`` or ``ablation``."""
    seed: int
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    seconds: float | None
    """Wall-clock time of the whole run."""
    steps: Sequence[Mapping[str, Any]]
    """One entry a training step."""
    evaluations: Sequence[Mapping[str, Any]]
    """One entry an evaluation on the held-out problems, by ascending step; at least one after step 0."""


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run, as the module's docstring defines them; ``None`` where the run does not have one."""

    last_step: int
    start_accuracy: float
    """At the first evaluation."""
    final_accuracy: float
    area: float
    final_pass: float
    response_length: float | None
    """Tokens."""
    entropy: float | None
    seconds_step: float | None
    seconds_weights: float | None
    """Of these, seconds for the token weights."""
    selected_rate: float | None
    """Share of responses that got token weights from scores, mean over steps."""
    advantage_scale: float | None
    """Mean of ``|token advantage|`` over the mean of ``|advantage|``, mean over steps."""


@dataclass(frozen=True)
class Difference:
    """Mean difference over the seeds that two arms share, and its 95 % interval."""

    seeds: tuple[int, ...]
    value: float
    low: float | None
    high: float | None
    """``None`` with a single seed."""
    p_value: float | None
    """Exact two-sided sign-flip test; ``None`` with a single seed or with more than ``MAX_EXACT_SEEDS``."""

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below zero, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > _ROUNDING) - int(self.high < -_ROUNDING)


def read_runs(raw_dir: Path) -> list[Run]:
    """All runs of a folder, by arm and seed.

    Raises:
        ValueError: no run, two files of one run, or a file that is damaged or not a finished run; the message names it.
    """
    runs: dict[tuple[str, int], Run] = {}
    for path in sorted(raw_dir.glob("*.json")):
        run = _read_run(path)
        if (run.arm, run.seed) in runs:
            raise ValueError(f"{path}: arm {run.arm!r} with seed {run.seed} is there twice; remove one of the files")
        runs[run.arm, run.seed] = run
    if not runs:
        raise ValueError(f"{raw_dir} holds no run (ARM-seedK.json); run the study first")
    return [runs[key] for key in sorted(runs)]


def _read_run(path: Path) -> Run:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); remove it and run it again") from None
    missing = [key for key in _RUN_KEYS if key not in data]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it is not a file of a run")
    evaluations = sorted(data["evaluations"], key=lambda evaluation: evaluation["step"])
    if not evaluations or evaluations[-1]["step"] <= 0:
        raise ValueError(f"{path} has no evaluation after step 0; let the run finish")
    for evaluation in evaluations:
        for name in ("accuracy", "pass_at_3"):
            value = evaluation[name]
            if not 0 <= value <= 1:  # also refuses NaN
                raise ValueError(f"{path}: {name}={value} at step {evaluation['step']} must lie in [0, 1]")
    return Run(
        arm=data["arm"],
        label=data.get("label") or data["arm"],
        group=data["group"],
        seed=data["seed"],
        settings=data.get("settings") or {},
        versions=data.get("versions") or {},
        seconds=data.get("seconds"),
        steps=data["steps"],
        evaluations=evaluations,
    )


def figures(run: Run) -> RunFigures:
    """The figures of one run."""
    steps = [evaluation["step"] for evaluation in run.evaluations]
    accuracies = [evaluation["accuracy"] for evaluation in run.evaluations]
    last = [evaluation for evaluation in run.evaluations if evaluation["step"] > 0][-LAST_EVALUATIONS:]
    tail = run.steps[-LAST_STEPS:]
    return RunFigures(
        last_step=steps[-1],
        start_accuracy=accuracies[0],
        final_accuracy=float(np.mean([evaluation["accuracy"] for evaluation in last])),
        area=area_under_curve(steps, accuracies),
        final_pass=float(np.mean([evaluation["pass_at_3"] for evaluation in last])),
        response_length=_over_steps(np.mean, tail, "response_length"),
        entropy=_over_steps(np.mean, tail, "entropy"),
        seconds_step=_over_steps(np.median, run.steps, "seconds"),
        seconds_weights=_over_steps(np.median, run.steps, "seconds_weights"),
        selected_rate=_over_steps(np.mean, run.steps, "selected_rate"),
        advantage_scale=_over_steps(np.mean, run.steps, "advantage_scale"),
    )


def _over_steps(reduce: Any, steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None and math.isfinite(step[name])]
    return float(reduce(values)) if values else None


def area_under_curve(steps: Sequence[int], accuracies: Sequence[float]) -> float:
    """Mean height of the curve through the points, by trapezoids; the value itself for a single point."""
    if len(steps) == 1:
        return float(accuracies[0])
    return float(np.trapezoid(accuracies, steps) / (steps[-1] - steps[0]))


def steps_to_accuracy(run: Run, target: float) -> float | None:
    """First step at which the curve through the evaluations is at ``target`` or above; ``None`` if it never is."""
    first = run.evaluations[0]
    if first["accuracy"] >= target:
        return float(first["step"])
    for before, after in pairwise(run.evaluations):
        if after["accuracy"] >= target:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return float(before["step"] + share * (after["step"] - before["step"]))
    return None


def target_accuracy(runs: Sequence[Run], baseline: str = BASELINE) -> float | None:
    """Accuracy at 80 % of what the baseline gains on average; ``None`` without a baseline run or without a gain."""
    found = [figures(run) for run in runs if run.arm == baseline]
    if not found:
        return None
    start = float(np.mean([figure.start_accuracy for figure in found]))
    gain = float(np.mean([figure.final_accuracy for figure in found])) - start
    return start + TARGET_SHARE * gain if gain > 0 else None


def restricted_steps(runs: Sequence[Run], target: float, horizon: int) -> tuple[float, int]:
    """Mean steps to ``target``, where a run that is not there by step ``horizon`` counts as ``horizon``, and how many did."""
    steps = [steps_to_accuracy(run, target) for run in runs]
    reached = [step for step in steps if step is not None and step <= horizon]
    return float(np.mean([*reached, *[horizon] * (len(steps) - len(reached))])), len(steps) - len(reached)


def pairs(runs: Sequence[Run], arm: str, reference: str = BASELINE) -> list[tuple[Run, Run]]:
    """``(run of arm, run of reference)`` of every seed that both have and whose evaluations can be compared."""
    references = {run.seed: run for run in runs if run.arm == reference}
    candidates = [(run, references[run.seed]) for run in runs if run.arm == arm and run.seed in references]
    return [pair for pair in candidates if _evaluated_on(pair[0]) == _evaluated_on(pair[1])]


def not_comparable(runs: Sequence[Run], arm: str, reference: str = BASELINE) -> list[int]:
    """Seeds that both arms have but :func:`pairs` leaves out: other evaluation steps or another number of problems."""
    paired = {run.seed for run, _ in pairs(runs, arm, reference)}
    seeds = [{run.seed for run in runs if run.arm == name} for name in (arm, reference)]
    return sorted((seeds[0] & seeds[1]) - paired)


def _evaluated_on(run: Run) -> list[tuple[int, int]]:
    return [(evaluation["step"], len(evaluation.get("correct", ()))) for evaluation in run.evaluations]


def paired_difference(differences: Mapping[int, float]) -> Difference | None:
    """Mean of the differences by seed with its interval; ``None`` where there is none."""
    if not differences:
        return None
    values = np.array(list(differences.values()), dtype=float)
    low_high = bootstrap_interval(values)
    return Difference(
        seeds=tuple(sorted(differences)),
        value=float(values.mean()),
        low=low_high[0] if low_high else None,
        high=low_high[1] if low_high else None,
        p_value=sign_flip_p(values),
    )


def compare(runs: Sequence[Run], arm: str, figure: str, reference: str = BASELINE) -> Difference | None:
    """``arm`` minus ``reference`` in one figure of :class:`RunFigures`; seeds where either has none are left out."""
    values = {
        run.seed: (getattr(figures(run), figure), getattr(figures(other), figure))
        for run, other in pairs(runs, arm, reference)
    }
    return paired_difference(
        {seed: first - second for seed, (first, second) in values.items() if first is not None and second is not None}
    )


def compare_steps(runs: Sequence[Run], arm: str, target: float, reference: str = BASELINE) -> Difference | None:
    """``arm`` minus ``reference`` in restricted steps to ``target``; negative where the arm is faster."""
    return paired_difference(
        {
            run.seed: restricted_steps([run], target, run.evaluations[-1]["step"])[0]
            - restricted_steps([other], target, other.evaluations[-1]["step"])[0]
            for run, other in pairs(runs, arm, reference)
        }
    )


def compare_ratio(runs: Sequence[Run], arm: str, figure: str, reference: str = BASELINE) -> Difference | None:
    """Geometric mean over seeds of ``arm`` divided by ``reference``, with its interval on the same scale.

    ``p_value`` is that of the logarithms; ``sign`` is about zero and says nothing of a ratio.
    """
    values = {
        run.seed: (getattr(figures(run), figure), getattr(figures(other), figure))
        for run, other in pairs(runs, arm, reference)
    }
    logs = paired_difference({seed: math.log(a / b) for seed, (a, b) in values.items() if a and b})
    if logs is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Difference(logs.seeds, math.exp(logs.value), low, high, logs.p_value)


def bootstrap_interval(values_N: np.ndarray, key: str = "seeds") -> tuple[float, float] | None:
    """95 % interval of the mean, by 10,000 bootstrap resamples; the same for the same values, ``None`` below two.

    Its ends are the resampled means' quantiles at ``Phi(-t sqrt(n / (n - 1)))`` from either side, t being Student's 97.5 %
    quantile with n - 1 degrees of freedom, instead of at 2.5 %. The plain percentile interval is too narrow for few values
    by as much (Hesterberg 2015, "expanded percentile interval"); for many values both are the same.
    """
    count = len(values_N)
    if count < 2:
        return None
    low, high = _interval(_resamples(key, count) @ values_N[:, None], count)
    return float(low[0]), float(high[0])


def _interval(means_RM: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    tail = NormalDist().cdf(-_student_quantile(count - 1) * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means_RM, [tail, 1 - tail], axis=0)
    return low, high


@lru_cache
def _student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's distribution, from its integrated density."""
    x = np.linspace(0, 20, 200_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(x**2 / degrees))
    below = 0.5 + np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    return float(np.interp((1 + LEVEL) / 2, below, x))


@lru_cache(maxsize=4)
def _resamples(key: str, count: int) -> np.ndarray:
    """Weight of each value in each resample's mean: (resamples, count); kept, as one study asks for the same ones often."""
    return resample_counts(key, count) / count


def sign_flip_p(values_N: np.ndarray) -> float | None:
    """Two-sided exact p-value of a mean of zero, under which each difference is as likely with either sign.

    With n values it is never below ``2 / 2**n``. ``None`` below two values and above ``MAX_EXACT_SEEDS``.
    """
    count = len(values_N)
    if not 2 <= count <= MAX_EXACT_SEEDS:
        return None
    signs_FN = np.array(list(product((-1.0, 1.0), repeat=count)))
    return float(np.mean(np.abs(signs_FN @ values_N) >= abs(values_N.sum()) - _ROUNDING))


@lru_cache
def false_alarm_rate(seeds: int) -> float:
    """How often the interval over so many seeds excludes zero though there is no difference; 0.05 if it were exact.

    From 1000 simulated studies with normal differences, and the very resamples that :func:`bootstrap_interval` takes.
    """
    if seeds < 2:
        raise ValueError(f"seeds={seeds} must be at least 2; one seed has no interval")
    generator = np.random.default_rng(SEED)
    excluded = []
    for _ in range(4):  # all at once would take 80 MB
        low_S, high_S = _interval(_resamples("seeds", seeds) @ generator.standard_normal((seeds, 250)), seeds)
        excluded.append(np.mean((low_S > 0) | (high_S < 0)))
    return float(np.mean(excluded))


def missing_runs(runs: Sequence[Run], expected: Sequence[tuple[str, int]] = ()) -> list[tuple[str, int]]:
    """Runs ``(arm, seed)`` that were expected and are not there.

    Without ``expected``: every ablation should have the seeds that any ablation has, and every other arm those of the others.
    """
    there = {(run.arm, run.seed) for run in runs}
    if not expected:
        seeds_of: dict[bool, set[int]] = {}
        for run in runs:
            seeds_of.setdefault(run.group == "ablation", set()).add(run.seed)
        expected = [(run.arm, seed) for run in runs for seed in seeds_of[run.group == "ablation"]]
    return sorted(set(expected) - there)
