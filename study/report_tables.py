"""The tables of a regime in the second study's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from recipe.marked_text import table
from study import alignment, truth
from study.arms import ARMS, Arm
from study.plan import BOUND, CONTRASTS, RegimePlan
from study.results import BASELINE, Contrast, Results, Row, compared
from study.statistics import paired
from study.tables import ABSENT, interval, number, p_value, signed
from study.work import RUN_COLUMNS

EXPLORATORY = (("random_token", "spread"), ("right_only", "random_token"), ("grail", "grail_shuffled"))
"""Further pairs that the report shows, without a correction."""
SECONDARY: dict[str, Callable[[Row], float]] = {
    "temperature 0.6, %": lambda row: 100 * float(row["accuracy_last"]),
    "temperature 1, %": lambda row: 100 * float(row["accuracy_hot"]),
    "greedy, %": lambda row: 100 * float(row["accuracy_greedy"]),
    "given wording, %": lambda row: 100 * float(row["exact"]),
    "its gap to sampling": lambda row: 100 * (float(row["exact"]) - float(row["accuracy_last"])),
    "given wording, temperature 1, %": lambda row: 100 * float(row["exact_hot"]),
    "gap": lambda row: 100 * (float(row["exact_hot"]) - float(row["accuracy_hot"])),
    "tokens": lambda row: float(row["length"]),
    "of filler": lambda row: float(row["filler"]),
    "of asides": lambda row: float(row["asides"]),
    "clipped of the errors with an advantage, %": lambda row: 100 * float(row["clipped_errors"]),
    "gradient norm": lambda row: float(row["gradient_norm"]),
}
TRUTH = {
    "all tokens": ("auroc_all", "all"),
    "among results": ("auroc_results", "all"),
    "error first": ("auroc_results", "first"),
    "middle": ("auroc_results", "middle"),
    "last": ("auroc_results", "last"),
    "steps above filler, wrong rows": ("relevance", "wrong"),
    "right rows": ("relevance", "right"),
    "weight of the error / of its type": ("weight_ratio", "all"),
    "rank correlation, wrong rows": ("rank_correlation", "wrong"),
    "right rows ": ("rank_correlation", "right"),
}
"""Columns of the ground truth: figure and split."""


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares."""
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def counted(count: int, word: str) -> str:
    """With the word's plural."""
    return f"{count} {word}{'s' * (count != 1)}"


def last_accuracy(row: Row, samples: int) -> float:
    """Share of right samples after the last step alone."""
    return sum(map(int, row["right_2"])) / (len(row["right_2"]) * samples)


def main_tables(results: Results, regime: RegimePlan) -> list[str]:
    """Outcome and other figures of the main arms, and pairs at both temperatures."""
    if not results.runs("main", regime.name, BASELINE):
        return []
    arms, run = results.plan.arms(regime), results.plan.run
    note = (
        f"Accuracy at temperature {run.temperature:g}, mean of the evaluations after steps "
        f"{' and '.join(map(str, run.evaluate_at))}, over seeds ± standard deviation. Differences within a seed with their "
        f"deviation over seeds: 95 % intervals by Student's distribution, and by a bootstrap over seeds and problems; paired "
        f"t-tests; equivalence by two one-sided tests against {100 * BOUND:g} points, uncorrected: a small p says level. "
        f"p-values without Holm's correction are exploratory. An arm whose planned seeds are not all there shows only how "
        f"many are. The oracle's advantages are exact under given wording; they are no upper bound. Minutes: processor time "
        f"of training on one thread, without evaluation, and of that for token weights."
    )
    lines = [*_outcomes(results, regime, arms, "main"), "", note, "", *_secondary(results, regime, arms, "main"), ""]
    return lines + _at_temperature_1(results, regime)


def side_tables(results: Results, regime: RegimePlan) -> list[str]:
    """The same of the side arms."""
    arms = [arm for arm in results.plan.side_arms if results.runs("side", regime.name, arm.name)]
    if not arms:
        return []
    lines = ["Side arms, at the learning rate of uniform:", "", *_outcomes(results, regime, arms, "side"), ""]
    lines += [*_secondary(results, regime, arms, "side"), ""]
    figures = [name for name in RUN_COLUMNS if not name.endswith("seconds")]
    main = results.runs("main", regime.name, BASELINE)
    alike = [
        arm.label
        for arm in arms
        if all(
            seed in main and all(row[name] == main[seed][name] for name in figures)
            for seed, row in results.runs("side", regime.name, arm.name).items()
        )
    ]
    words = "Number for number the runs of uniform, because what they wait for never came"
    return [*lines, f"{words}: {'; '.join(alike)}.", ""] if alike else lines


def _outcomes(results: Results, regime: RegimePlan, arms: Sequence[Arm], kind: str) -> list[str]:
    head = ["arm", "seeds", "rate", "accuracy, %", "against uniform, points", "deviation", "bootstrap interval"]
    head += ["seeds above", "p", "p, Holm", f"p, equivalence within {100 * BOUND:g}", "minutes a run", "for weights"]
    planned = compared(results) if kind == "main" and regime is results.plan.regimes[0] else []
    corrected = {(contrast.arm, contrast.reference): p for contrast, p in planned}
    seeds = len(regime.main_seeds if kind == "main" else regime.side_seeds)
    rows = []
    for arm in arms:
        runs = pd.DataFrame(results.runs(kind, regime.name, arm.name).values())
        rate = " ".join(sorted({f"{float(rate):g}" for rate in runs.get("rate", ())}))
        if len(runs) < seeds:
            rows.append([arm.label, f"{len(runs)} of {seeds}", rate, *[ABSENT] * (len(head) - 3)])
            continue
        contrast = results.contrast(regime, arm.name, BASELINE, kind) if arm.name != BASELINE else None
        minutes = [f"{runs[name].astype(float).mean() / 60:.2f}" for name in ("processor_seconds", "weight_seconds")]
        cells = _judged(contrast, corrected.get((arm.name, BASELINE)))
        rows.append([arm.label, str(seeds), rate, percent(runs.accuracy.astype(float)), *cells, *minutes])
    for pair in (*CONTRASTS, *EXPLORATORY) if kind == "main" else ():
        contrast = results.contrast(regime, *pair) if pair[1] != BASELINE else None
        if contrast is not None and contrast.complete:
            rates = " / ".join(f"{results.rate(regime, arm):g}" for arm in pair)
            rows.append([_pair_label(*pair), str(seeds), rates, "", *_judged(contrast, corrected.get(pair)), "", ""])
    return table(head, rows, right=1)


def _pair_label(arm: str, reference: str) -> str:
    return f"{ARMS[arm].label} - {ARMS[reference].label}"


def _judged(contrast: Contrast | None, corrected: float | None) -> list[str]:
    """Cells from the difference on; two seeds are too few to test."""
    if contrast is None or not contrast.complete:
        return [ABSENT] * 7
    low, high = contrast.both_ways
    row = [interval(contrast.paired, 100), f"{100 * contrast.paired.deviation:.1f}"]
    row += [f"[{signed(100 * low)}, {signed(100 * high)}]", f"{contrast.above} of {len(contrast.seeds)}"]
    if contrast.planned < 3:
        return [*row, ABSENT, ABSENT, ABSENT]
    corrected_p = ABSENT if corrected is None else p_value(corrected)
    return [*row, p_value(contrast.paired.p), corrected_p, p_value(contrast.equivalence)]


def _secondary(results: Results, regime: RegimePlan, arms: Sequence[Arm], kind: str) -> list[str]:
    rows = []
    for arm in arms:
        if kind == "main" and not results.complete(regime, arm.name):
            continue
        runs = [
            {**row, "accuracy_last": str(last_accuracy(row, results.plan.run.samples))}
            for row in results.runs(kind, regime.name, arm.name).values()
        ]
        means = {name: np.mean([figure(row) for row in runs]) for name, figure in SECONDARY.items()}
        rows.append([arm.label, *(f"{mean:.{3 if name == 'gradient norm' else 1}f}" for name, mean in means.items())])
    return table(["arm, after the last step", *SECONDARY], rows, right=1) if rows else []


def _at_temperature_1(results: Results, regime: RegimePlan) -> list[str]:
    """Pairs after the last step alone, at both temperatures: at 1 an arm that only sharpens gains, too."""
    run, rows = results.plan.run, []
    figures = (lambda row: last_accuracy(row, run.samples), lambda row: float(row["accuracy_hot"]))
    for pair in (*CONTRASTS, *EXPLORATORY):
        if not all(results.complete(regime, arm) for arm in pair):
            continue
        own, other = (results.runs("main", regime.name, arm) for arm in pair)
        cells = [_pair_label(*pair)]
        for figure in figures:
            difference = paired([figure(own[seed]) - figure(other[seed]) for seed in regime.main_seeds])
            cells += [interval(difference, 100), p_value(difference.p)]
        rows.append(cells)
    head = ["after the last step, points", f"temperature {run.temperature:g}", "p", "temperature 1", "p"]
    note = f"Exploratory, uncorrected; {run.samples} and {run.samples_hot} samples of a problem."
    return [*table(head, rows, right=1), "", note, ""] if rows else []


def tuning_table(results: Results, regime: RegimePlan) -> list[str]:
    """Accuracy at every learning rate, and the one that was taken."""
    plan, rows = results.plan, []
    tuning = [
        row
        for row in (*results.rows["tune"], *results.rows["pilot"])
        if row["regime"] == regime.name and int(row["seed"]) in regime.tuning_seeds
    ]
    taken = plan.tuned_rates(tuning)
    for arm in plan.arms(regime):
        runs = [row for row in tuning if row["arm"] == arm.name]
        by_rate = [[float(row["accuracy"]) for row in runs if row["rate"] == repr(rate)] for rate in plan.rates]
        rate = taken.get((regime.name, arm.name), math.nan)
        by_first = {
            float(row["rate"]): float(row["accuracy"]) for row in runs if int(row["seed"]) == regime.tuning_seeds[0]
        }
        alone = f"{best_rate(by_first):g}" if len(by_first) == len(plan.rates) else ABSENT
        end = ", an end of the grid" if rate in (min(plan.rates), max(plan.rates)) else ""
        cells = [f"{100 * np.mean(values):.1f}" if values else ABSENT for values in by_rate]
        if runs:
            chosen = ABSENT if math.isnan(rate) else f"{rate:g}{end}"
            rows.append([arm.label, len(plan.tuning_seeds(regime, arm)), *cells, chosen, alone])
    head = ["accuracy in tuning, %", "seeds", *[f"rate {rate:g}" for rate in plan.rates], "taken"]
    head.append(f"by seed {regime.tuning_seeds[0]} alone")
    return [*table(head, rows, right=1), ""] if rows else []


def best_rate(accuracy: Mapping[float, float]) -> float:
    """The rate of the highest accuracy, of equal ones the lowest."""
    return min(accuracy, key=lambda rate: (-accuracy[rate], rate))


def pilot_table(results: Results, regime: RegimePlan) -> list[str]:
    """The pilot's models, and the spread of its differences."""
    starts, lines, rows = results.starts(regime, regime.pilot_seeds, "accuracy"), [], []
    if starts:
        models = f"Pilot: {len(starts)} of {len(regime.pilot_seeds)} warmed-up models"
        lines = [f"{models}, {percent(starts)} of the samples right.", ""]
    base = results.runs("pilot", regime.name, BASELINE)
    for arm in results.plan.pilot_arms if base else ():
        runs = {seed: float(row["accuracy"]) for seed, row in results.runs("pilot", regime.name, arm).items()}
        differences = [
            accuracy - float(base[seed]["accuracy"]) for seed, accuracy in sorted(runs.items()) if seed in base
        ]
        enough = arm != BASELINE and len(differences) > 1
        if runs:
            deviation = f"{100 * paired(differences).deviation:.2f}" if enough else ABSENT
            rows.append([ARMS[arm].label, len(runs), percent(list(runs.values())), deviation])
    head = ["pilot", "seeds", "accuracy, %", "deviation of the difference from uniform, points"]
    return [*lines, *table(head, rows, right=1), ""] if rows else lines


def alignment_table(results: Results, regime: RegimePlan) -> list[str]:
    """Updates against the exact gradient."""
    rows = [row for row in results.rows["alignment"] if row["regime"] == regime.name]
    base = {row["seed"]: float(row["gain"]) for row in rows if row["measured"] == BASELINE}
    cells = []
    for arm in ARMS.values():
        own = [row for row in rows if row["measured"] == arm.name]
        if own and not arm.rollouts:  # the measurement draws as many rollouts for all
            ratios = [float(row["gain"]) / base[row["seed"]] for row in own if base.get(row["seed"])]
            relative = interval(paired(ratios), digits=2).replace("+", "") if ratios else ABSENT
            figures = [f"{np.mean([float(row[name]) for row in own]):.3f}" for name in alignment.FIGURES]
            cells.append([arm.label, figures[0], relative, *figures[1:]])
    head = ["before training", "gain of a step", "over uniform's", "cosine", "signal to noise"]
    models = counted(len({row["seed"] for row in rows}), "warmed-up model")
    title = f"Updates against the exact gradient of accuracy, {models}:"
    return [title, "", *table(head, cells, right=1), ""] if rows else []


def truth_table(results: Results, regime: RegimePlan) -> list[str]:
    """Whether scores find the wrong result."""
    rows = pd.DataFrame([row for row in results.rows["truth"] if row["regime"] == regime.name])
    if rows.empty:
        return []
    means: Mapping = rows.assign(value=rows.value.astype(float)).groupby(["method", "figure", "split"]).value.mean()
    labels = truth.LABELS | {name: f"baseline: {label}" for name, label in truth.BASELINES.items()}
    cells = [
        [label, *(number(means.get((method, *column), math.nan)) for column in TRUTH.values())]
        for method, label in labels.items()
        if (rows.method == method).any()
    ]
    models = counted(rows.seed.nunique(), "warmed-up model")
    title = f"Do scores find the wrong result? AUROC and more, mean over {models}:"
    return [title, "", *table(["score", *TRUTH], cells, right=1), ""]
