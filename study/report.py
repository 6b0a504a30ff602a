"""The report of the second study, ``REPORT.md`` and its plot, from its raw files alone: the same files give the same page to
the last byte.

No sentence of the conclusions is written by hand. A contrast is judged once all planned seeds of both arms are there; until
then an arm shows how many of its seeds are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from recipe.files import write_text
from study import alignment, truth
from study.arms import ARMS, Arm
from study.plan import BOUND, COMPARED, CONTRASTS, RUNS, RegimePlan, StudyPlan
from study.statistics import Paired, equivalence_p, holm, paired, t_interval, two_way_bootstrap
from study.tables import ABSENT, interval, markdown_table, number, p_value, pyplot, signed
from study.work import RUN_COLUMNS, Files, finished, total_hours

BASELINE = "uniform"
LEVEL = 0.05
PLOT = "differences.png"
AMOUNT_OR_PLACE = ("random_token", "spread")
EXPLORATORY = (AMOUNT_OR_PLACE, ("right_only", "random_token"), ("grail", "grail_shuffled"))
"""Further pairs that the report shows, without a correction."""
LEVELLED = f"level within {100 * BOUND:g}"
NAMED = 5
"""Of more arms on one side of uniform, the conclusions give the number."""
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

    @classmethod
    def read(cls, plan: StudyPlan, files: Files) -> Results:
        """From the raw files."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for job_rows in finished(files, plan).values():
            rows[job_rows[0]["kind"]] += job_rows
        return cls(plan, rows, total_hours(files))

    def runs(self, kind: str, regime: str, arm: str) -> dict[int, Row]:
        """Runs of one arm by seed."""
        return {int(row["seed"]): row for row in self.rows[kind] if (row["regime"], row["arm"]) == (regime, arm)}

    def complete(self, regime: RegimePlan, arm: str) -> bool:
        """Whether all of a main arm's planned seeds are there."""
        return self.runs("main", regime.name, arm).keys() >= set(regime.main_seeds)

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


def write_report(plan: StudyPlan, files: Files, folder: Path) -> list[Path]:
    """Write the report and its plot, where there is something to draw, and return their paths."""
    results = Results.read(plan, files)
    write_text(folder / "REPORT.md", markdown(results))
    return [folder / "REPORT.md", *plot_differences(results, folder / PLOT)]


def markdown(results: Results) -> str:
    """The report as a Markdown page."""
    lines = ["# The second study: which weighting helps, and why", "", "## Conclusions", ""]
    lines += [f"- {line}" for line in conclusions(results)]
    lines += [
        "",
        "The question, the outcome and the comparisons were fixed [before](PLAN.md). All other figures are exploratory.",
        "Measurements on a real model, and the command for a GPU: [real_model.md](real_model.md).",
        "",
    ]
    if drawn(results):
        lines += [f"![Difference from uniform by arm and regime]({PLOT})", ""]
    for regime in results.plan.regimes:
        lines += _regime(results, regime)
    lines += ["## What is missing", "", *[f"- {line}" for line in missing(results)], ""]
    by_kind = ", ".join(f"{kind} {hours:.2f}" for kind, hours in sorted(results.hours.items()))
    lines += [
        f"Processor time of the recorded jobs: {sum(results.hours.values()):.2f} of the plan's {results.plan.hours:g} "
        f"core-hours{f' ({by_kind})' if by_kind else ''}.",
        "",
    ]
    versions = sorted({row["versions"] for rows in results.rows.values() for row in rows})
    lines += [f"Versions: {version}." for version in versions]
    return "\n".join(lines).rstrip() + "\n"


def drawn(results: Results) -> dict[str, list[Contrast]]:
    """By regime the main arms whose planned seeds are all there, against uniform."""
    by_regime = {regime.name: results.against_baseline(regime) for regime in results.plan.regimes}
    return {name: contrasts for name, contrasts in by_regime.items() if contrasts}


def plot_differences(results: Results, path: Path) -> list[Path]:
    """Every main arm's difference from uniform, one panel a regime; an empty list where nothing can be drawn."""
    panels = drawn(results)
    if not panels:
        return []
    shown = {contrast.arm for contrasts in panels.values() for contrast in contrasts}
    everywhere = {arm.name: arm for regime in results.plan.regimes for arm in results.plan.arms(regime)}
    arms = [arm for name, arm in everywhere.items() if name in shown]
    plots = pyplot()
    figure, axes = plots.subplots(
        ncols=len(panels),
        figsize=(4.2 + 2.3 * len(panels), 1.0 + 0.32 * len(arms)),
        dpi=120,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    compared = {arm for arm, _ in CONTRASTS}
    for panel, (name, contrasts) in zip(axes[0], panels.items(), strict=True):
        panel.axvspan(-100 * BOUND, 100 * BOUND, color="#eef0f2", linewidth=0)
        panel.axvline(0, color="black", linewidth=0.8)
        for contrast in contrasts:
            height = len(arms) - 1 - [arm.name for arm in arms].index(contrast.arm)
            colour = "#0b6e4f" if contrast.arm in compared and name == results.plan.regimes[0].name else "#7a8793"
            difference = contrast.paired
            tested = t_interval(difference, 0.9)
            panel.plot([100 * difference.low, 100 * difference.high], [height, height], color=colour, linewidth=1.2)
            panel.plot([100 * end for end in tested], [height, height], color=colour, linewidth=4, alpha=0.45)
            panel.plot(100 * difference.mean, height, "o", color=colour, markersize=5)
        others = len(results.plan.arms(results.plan.regime(name))) - 1
        some = f"\n{len(contrasts)} of {others} arms complete" if len(contrasts) < others else ""
        panel.set(title=f"{name}, {contrasts[0].planned} seeds{some}", ylim=(-0.6, len(arms) - 0.4))
        panel.title.set_fontsize(9)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    axes[0, 0].set_yticks(range(len(arms)), [arm.label for arm in reversed(arms)])
    label = f"accuracy at temperature {results.plan.run.temperature:g} against uniform, points: mean, 95 and 90 % interval;\n"
    figure.supxlabel(
        f"{label}level within {100 * BOUND:g} where 90 % lie in the shade; planned comparisons in green", fontsize=8
    )
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    plots.close(figure)
    return [path]


def conclusions(results: Results) -> list[str]:
    """At most five lines, by rule."""
    primary = results.plan.regimes[0]
    compared = _compared(results)
    if not compared:
        done = {arm: len(results.runs("main", primary.name, arm)) for arm in COMPARED}
        counts = ", ".join(f"{ARMS[arm].label} {count}" for arm, count in done.items())
        planned = len(primary.main_seeds)
        return [
            f"**Nothing is concluded yet.** Of {planned} planned seeds of the regime {primary.name} there are: {counts}."
        ]
    lines = [_sentence(contrast, p) for contrast, p in compared]
    by_pair = {(c.arm, c.reference): _verdict(c, p) for c, p in compared}
    return [*lines, _decision(by_pair), *_others(results, primary)]


def _decision(verdicts: Mapping[tuple[str, str], str]) -> str:
    """The plan's decision from the verdicts of its comparisons."""
    pick, control = ARMS["surprisal"].label, ARMS["random_token"].label
    above, placed = verdicts["surprisal", BASELINE] == "better", verdicts["surprisal", "random_token"]
    if above and placed == "better":
        return (
            f"**{pick}** stands above uniform and above a random token in its place: the recommendation for experiments. "
            "What it costs stands in the table."
        )
    decision = (
        "**No method was shown to stand above uniform and above its random-placement control**: none is recommended."
    )
    if above:
        placement = {
            "worse": "it is worse",
            "not decided": "whether the place matters was not decided",
        }.get(placed, f"it is {placed} points")
        decision += (
            f" Against the control ({control}) {placement}: what stands above uniform may be no more than to leave little of "
            "the wrong responses."
        )
    if verdicts["grail", BASELINE] == "better":
        decision += " GRAIL stands above uniform; its control, its weights shuffled, was not among the comparisons."
    return decision


def _others(results: Results, regime: RegimePlan) -> list[str]:
    """The result of the arms that the plan does not compare with uniform, with a correction of their own, once all are there;
    and links to the other regimes."""
    planned = [
        arm for arm in results.plan.arms(regime) if arm.name != BASELINE and (arm.name, BASELINE) not in CONTRASTS
    ]
    others = [contrast for contrast in results.against_baseline(regime) if (contrast.arm, BASELINE) not in CONTRASTS]
    lines = []
    if all(results.complete(regime, arm) for arm in AMOUNT_OR_PLACE):
        lines.append(_pair_sentence(results, regime, *AMOUNT_OR_PLACE))
    if others and len(others) == len(planned):
        lines.append(
            f"Of the other main arms (Holm's correction over these {len(others)}; most of their learning rates from one "
            f"tuning seed) {_ranked(others)}."
        )
    links = [
        f"[{other.name}](#regime-{other.name})" for other in results.plan.regimes[1:] if results.against_baseline(other)
    ]
    if links:
        lines.append(f"Further regimes: {', '.join(links)}.")
    return [f"Exploratory: {' '.join(lines)}"] if lines else []


def _exploratory(results: Results, regime: RegimePlan) -> str:
    """The result of a regime of which the plan decides nothing, for the arms whose seeds are all there; empty without any."""
    contrasts, planned = results.against_baseline(regime), len(results.plan.arms(regime)) - 1
    if not contrasts:
        return ""
    corrected = "Holm's correction over these" if len(contrasts) > 1 else "no correction"
    tuned = _counted(len(regime.tuning_seeds), "tuning seed")
    share = f"of {planned} arms" if len(contrasts) == planned else f"{len(contrasts)} of {planned} arms complete"
    sentences = f"{share} ({corrected}; learning rates from {tuned}), {_ranked(contrasts)}."
    if {"surprisal", "random_token"} <= {contrast.arm for contrast in contrasts}:
        sentences += f" There, {_pair_sentence(results, regime, 'surprisal', 'random_token')}"
    return sentences


def _pair_sentence(results: Results, regime: RegimePlan, arm: str, reference: str) -> str:
    contrast = results.contrast(regime, arm, reference)
    assert contrast is not None
    opening = (
        f"{ARMS[arm].label} against {ARMS[reference].label}: {interval(contrast.paired, 100)} points, uncorrected p "
    )
    return f"{opening}{p_value(contrast.paired.p)}, of equivalence {p_value(contrast.equivalence)}."


def _ranked(contrasts: Sequence[Contrast]) -> str:
    corrected = holm([contrast.paired.p for contrast in contrasts])
    sides: dict[str, list[Contrast]] = {"above": [], "below": [], "not told from": []}
    for contrast, p in sorted(zip(contrasts, corrected, strict=True), key=lambda pair: -pair[0].paired.mean):
        side = ("above" if contrast.paired.mean > 0 else "below") if p < LEVEL else "not told from"
        sides[side].append(contrast)
    return "; ".join(f"{side} uniform: {_listed(those)}" for side, those in sides.items() if those)


def _listed(contrasts: Sequence[Contrast]) -> str:
    """With their mean differences, from the highest to the lowest; of many their number."""
    means = [signed(100 * contrast.paired.mean) for contrast in contrasts]
    if len(contrasts) > NAMED:
        return f"{len(contrasts)} arms ({means[-1]} to {means[0]})"
    return ", ".join(f"{ARMS[contrast.arm].label} ({mean})" for contrast, mean in zip(contrasts, means, strict=True))


def contrast_table(results: Results) -> list[str]:
    """The plan's comparisons as a short Markdown table; empty before all of their seeds are there."""
    compared = _compared(results)
    rows = [
        [
            f"{ARMS[contrast.arm].label}, against {ARMS[contrast.reference].label}",
            signed(100 * contrast.paired.mean),
            f"{signed(100 * contrast.paired.low)} to {signed(100 * contrast.paired.high)}",
            p_value(p),
            _so(contrast, p),
        ]
        for contrast, p in compared
    ]
    head = ["accuracy, points", "difference", "95 % interval", "p, Holm", "so"]
    return markdown_table(head, rows, right=1) if rows else []


def _compared(results: Results) -> list[tuple[Contrast, float]]:
    """The plan's comparisons with their corrected p-values; none before all of their seeds are there."""
    contrasts = [results.contrast(results.plan.regimes[0], *contrast) for contrast in CONTRASTS]
    complete = [contrast for contrast in contrasts if contrast is not None and contrast.complete]
    if len(complete) < len(CONTRASTS):
        return []
    return list(zip(complete, holm([contrast.paired.p for contrast in complete]), strict=True))


def _so(contrast: Contrast, p: float) -> str:
    verdict = _verdict(contrast, p)
    return f"{verdict} (p {p_value(contrast.equivalence)}, uncorrected)" if verdict == LEVELLED else verdict


def _verdict(contrast: Contrast, p: float) -> str:
    if p < LEVEL:
        return "better" if contrast.paired.mean > 0 else "worse"
    return LEVELLED if contrast.equivalence < LEVEL else "not decided"


def _sentence(contrast: Contrast, p: float) -> str:
    who = f"{ARMS[contrast.arm].label} against {ARMS[contrast.reference].label}"
    title = f"{who}: {interval(contrast.paired, 100)} points, p {p_value(p)} (Holm)"
    verdict = _verdict(contrast, p)
    if verdict in ("better", "worse"):
        return f"{title}: **{verdict}**."
    if verdict == LEVELLED:
        return f"{title}: **{verdict} points** (equivalence test, uncorrected, p {p_value(contrast.equivalence)})."
    return f"{title}: nothing is shown, neither a difference nor that there is none beyond {100 * BOUND:g} points."


def _regime(results: Results, regime: RegimePlan) -> list[str]:
    lines = [f"## Regime {regime.name}", ""]
    arms = results.plan.arms(regime) if results.runs("main", regime.name, BASELINE) else ()
    starts = [
        row for row in results.rows["start"] if row["regime"] == regime.name and int(row["seed"]) in regime.main_seeds
    ]
    if starts:
        right = [
            _percent([float(row[name]) for row in starts]) for name in ("accuracy", "accuracy_hot", "accuracy_greedy")
        ]
        lines += [
            f"Right before training, %: {right[0]} at temperature {results.plan.run.temperature:g}, {right[1]} at 1, "
            f"{right[2]} greedily.",
            "",
        ]
    if regime is not results.plan.regimes[0] and (exploratory := _exploratory(results, regime)):
        lines += [f"Exploratory: {exploratory}", ""]
    if arms:
        lines += [*_outcomes(results, regime, arms, "main"), "", *_secondary(results, regime, arms, "main"), ""]
        lines += _at_temperature_1(results, regime)
    side = [arm for arm in results.plan.side_arms if results.runs("side", regime.name, arm.name)]
    if side:
        lines += ["Side arms, at the learning rate of uniform:", "", *_outcomes(results, regime, side, "side"), ""]
        lines += [*_secondary(results, regime, side, "side"), ""]
        alike = [arm.label for arm in side if _as_uniform(results, regime, arm)]
        if alike:
            lines += [
                f"Number for number the runs of uniform, because what they wait for never came: {'; '.join(alike)}.",
                "",
            ]
    lines += _tuning(results, regime) + _pilot(results, regime) + _alignment(results, regime) + _truth(results, regime)
    if len(lines) == 2:
        lines += ["Nothing has been run.", ""]
    return lines


def _as_uniform(results: Results, regime: RegimePlan, arm: Arm) -> bool:
    """Whether a side arm's runs are uniform's to the last digit, apart from times."""
    own, other = results.runs("side", regime.name, arm.name), results.runs("main", regime.name, BASELINE)
    figures = [name for name in RUN_COLUMNS if not name.endswith("seconds")]
    return all(seed in other and all(row[name] == other[seed][name] for name in figures) for seed, row in own.items())


def _outcomes(results: Results, regime: RegimePlan, arms: Sequence[Arm], kind: str) -> list[str]:
    head = [
        "arm",
        "seeds",
        "rate",
        "accuracy, %",
        "against uniform, points",
        "deviation",
        "bootstrap interval",
        "p",
        "p, Holm",
    ]
    head += [f"p, equivalence within {100 * BOUND:g}", "minutes a run", "for weights"]
    pairs = [pair for pair in (*CONTRASTS, *EXPLORATORY) if kind == "main" and pair[1] != BASELINE]
    planned = _compared(results) if kind == "main" and regime is results.plan.regimes[0] else []
    corrected = {(contrast.arm, contrast.reference): p for contrast, p in planned}
    seeds = len(regime.main_seeds if kind == "main" else regime.side_seeds)
    rows = []
    for arm in arms:
        runs = results.runs(kind, regime.name, arm.name)
        rate = " ".join(sorted({f"{float(r['rate']):g}" for r in runs.values()}))
        if len(runs) < seeds:
            rows.append([arm.label, f"{len(runs)} of {seeds}", rate, *[ABSENT] * (len(head) - 3)])
            continue
        contrast = results.contrast(regime, arm.name, BASELINE, kind) if arm.name != BASELINE else None
        minutes = [
            f"{np.mean([float(r[name]) for r in runs.values()]) / 60:.2f}"
            for name in ("processor_seconds", "weight_seconds")
        ]
        accuracy = _percent([float(row["accuracy"]) for row in runs.values()])
        rows.append(
            [arm.label, str(seeds), rate, accuracy, *_judged(contrast, corrected.get((arm.name, BASELINE))), *minutes]
        )
    for pair in pairs:
        contrast = results.contrast(regime, *pair)
        if contrast is not None and contrast.complete:
            label = f"{ARMS[pair[0]].label} - {ARMS[pair[1]].label}"
            rows.append([label, str(seeds), "", "", *_judged(contrast, corrected.get(pair)), "", ""])
    if kind == "side":
        return markdown_table(head, rows, right=1)
    run = results.plan.run
    note = (
        f"Accuracy at temperature {run.temperature:g}, mean of the evaluations after steps "
        f"{' and '.join(map(str, run.evaluate_at))}, over seeds ± standard deviation. Differences within a seed with their "
        f"deviation over seeds: 95 % intervals by Student's distribution, and by a bootstrap over seeds and problems; paired "
        f"t-tests; equivalence by two one-sided tests against {100 * BOUND:g} points, uncorrected: a small p says level. "
        f"p-values without Holm's correction are exploratory. An arm whose planned seeds are not all there shows only how "
        f"many are. The oracle's advantages are exact under given wording; they are no upper bound. Minutes: processor time "
        f"of training on one thread, without evaluation, and of that for token weights."
    )
    return [*markdown_table(head, rows, right=1), "", note]


def _judged(contrast: Contrast | None, corrected: float | None) -> list[str]:
    """Cells from the difference on; two seeds are too few to test."""
    if contrast is None or not contrast.complete:
        return [ABSENT] * 6
    low, high = contrast.both_ways
    row = [interval(contrast.paired, 100), f"{100 * contrast.paired.deviation:.1f}"]
    row.append(f"[{signed(100 * low)}, {signed(100 * high)}]")
    if contrast.planned < 3:
        return [*row, ABSENT, ABSENT, ABSENT]
    corrected_p = ABSENT if corrected is None else p_value(corrected)
    return [*row, p_value(contrast.paired.p), corrected_p, p_value(contrast.equivalence)]


def last_accuracy(row: Row, plan: StudyPlan) -> float:
    """Share of right samples after the last step alone."""
    digits = row["right_2"]
    return sum(map(int, digits)) / (len(digits) * plan.run.samples)


_SECONDARY: dict[str, Callable[[Row], float]] = {
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


def _secondary(results: Results, regime: RegimePlan, arms: Sequence[Arm], kind: str) -> list[str]:
    rows = []
    for arm in arms:
        if kind == "main" and not results.complete(regime, arm.name):
            continue
        runs = [
            {**row, "accuracy_last": str(last_accuracy(row, results.plan))}
            for row in results.runs(kind, regime.name, arm.name).values()
        ]
        cells = [np.mean([figure(row) for row in runs]) for figure in _SECONDARY.values()]
        rows.append(
            [
                arm.label,
                *[
                    f"{cell:.3f}" if name == "gradient norm" else f"{cell:.1f}"
                    for name, cell in zip(_SECONDARY, cells, strict=True)
                ],
            ]
        )
    return markdown_table(["arm, after the last step", *_SECONDARY], rows, right=1) if rows else []


def _at_temperature_1(results: Results, regime: RegimePlan) -> list[str]:
    """Pairs after the last step alone, at both temperatures: at 1 an arm that only sharpens gains, too."""
    run, rows = results.plan.run, []
    for pair in (*CONTRASTS, *EXPLORATORY):
        if not all(results.complete(regime, arm) for arm in pair):
            continue
        own, other = (results.runs("main", regime.name, arm) for arm in pair)
        cells = [f"{ARMS[pair[0]].label} - {ARMS[pair[1]].label}"]
        for figure in (lambda row: last_accuracy(row, results.plan), lambda row: float(row["accuracy_hot"])):
            difference = paired([figure(own[seed]) - figure(other[seed]) for seed in regime.main_seeds])
            cells += [interval(difference, 100), p_value(difference.p)]
        rows.append(cells)
    if not rows:
        return []
    head = ["after the last step, points", f"temperature {run.temperature:g}", "p", "temperature 1", "p"]
    note = f"Exploratory, uncorrected; {run.samples} and {run.samples_hot} samples of a problem."
    return [*markdown_table(head, rows, right=1), "", note, ""]


def _tuning(results: Results, regime: RegimePlan) -> list[str]:
    rows = []
    tuning = [
        row
        for row in (*results.rows["tune"], *results.rows["pilot"])
        if row["regime"] == regime.name and int(row["seed"]) in regime.tuning_seeds
    ]
    rates = results.plan.tuned_rates(tuning)
    for arm in results.plan.arms(regime):
        runs = [row for row in tuning if row["arm"] == arm.name]
        if not runs:
            continue
        cells = [str(len(results.plan.tuning_seeds(regime, arm)))]
        for rate in results.plan.rates:
            values = [float(row["accuracy"]) for row in runs if row["rate"] == repr(rate)]
            cells.append(f"{100 * np.mean(values):.1f}" if values else ABSENT)
        taken = rates.get((regime.name, arm.name))
        end = ", an end of the grid" if taken in (min(results.plan.rates), max(results.plan.rates)) else ""
        rows.append([arm.label, *cells, ABSENT if taken is None else f"{taken:g}{end}"])
    if not rows:
        return []
    head = ["accuracy in tuning, %", "seeds", *[f"rate {rate:g}" for rate in results.plan.rates], "taken"]
    return [*markdown_table(head, rows, right=1), ""]


def _pilot(results: Results, regime: RegimePlan) -> list[str]:
    starts = [
        float(row["accuracy"])
        for row in results.rows["start"]
        if row["regime"] == regime.name and int(row["seed"]) in regime.pilot_seeds
    ]
    lines = []
    if starts:
        lines += [
            f"Pilot: {len(starts)} of {len(regime.pilot_seeds)} warmed-up models, {_percent(starts)} of the samples right.",
            "",
        ]
    arms = [arm for arm in results.plan.pilot_arms if results.runs("pilot", regime.name, arm)]
    if BASELINE not in arms:
        return lines
    rows = []
    base = results.runs("pilot", regime.name, BASELINE)
    for arm in arms:
        runs = results.runs("pilot", regime.name, arm)
        row = [ARMS[arm].label, str(len(runs)), _percent([float(r["accuracy"]) for r in runs.values()])]
        differences = [
            float(runs[seed]["accuracy"]) - float(base[seed]["accuracy"]) for seed in sorted(runs.keys() & base.keys())
        ]
        deviation = paired(differences).deviation if arm != BASELINE and len(differences) > 1 else math.nan
        rows.append([*row, ABSENT if math.isnan(deviation) else f"{100 * deviation:.2f}"])
    head = ["pilot", "seeds", "accuracy, %", "deviation of the difference from uniform, points"]
    return [*lines, *markdown_table(head, rows, right=1), ""]


def _alignment(results: Results, regime: RegimePlan) -> list[str]:
    rows = [row for row in results.rows["alignment"] if row["regime"] == regime.name]
    if not rows:
        return []
    seeds = sorted({row["seed"] for row in rows})
    base = {row["seed"]: float(row["gain"]) for row in rows if row["measured"] == BASELINE}
    cells = []
    for arm in ARMS.values():
        own = {row["seed"]: row for row in rows if row["measured"] == arm.name}
        if own:
            ratios = [float(row["gain"]) / base[seed] for seed, row in own.items() if base.get(seed)]
            relative = interval(paired(ratios), digits=2).replace("+", "") if ratios else ABSENT
            figures = [np.mean([float(row[name]) for row in own.values()]) for name in alignment.FIGURES]
            cells.append([arm.label, f"{figures[0]:.3f}", relative, *[f"{f:.3f}" for f in figures[1:]]])
    head = ["before training", "gain of a step", "over uniform's", "cosine", "signal to noise"]
    return [
        f"Updates against the exact gradient of accuracy, {_counted(len(seeds), 'warmed-up model')}:",
        "",
        *markdown_table(head, cells, right=1),
        "",
    ]


def _truth(results: Results, regime: RegimePlan) -> list[str]:
    rows = [row for row in results.rows["truth"] if row["regime"] == regime.name]
    if not rows:
        return []
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        values[row["method"], row["figure"], row["split"]].append(float(row["value"]))
    columns = {
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
    labels = truth.LABELS | {name: f"baseline: {label}" for name, label in truth.BASELINES.items()}
    cells = []
    for method, label in labels.items():
        figures = [values.get((method, *column), []) for column in columns.values()]
        if any(figures):
            cells.append([label, *[number(float(np.mean(one)) if one else math.nan) for one in figures]])
    seeds = len({row["seed"] for row in rows})
    return [
        f"Do scores find the wrong result? AUROC and more, mean over {_counted(seeds, 'warmed-up model')}:",
        "",
        *markdown_table(["score", *columns], cells, right=1),
        "",
    ]


def missing(results: Results) -> list[str]:
    """Jobs of the plan that are missing, by regime and kind."""
    done = {
        (row["kind"], row["regime"], row["arm"], row["seed"], row["rate"] if row["kind"] in ("pilot", "tune") else "")
        for rows in results.rows.values()
        for row in rows
    }
    counts: dict[tuple[str, str], list[int]] = {}
    for job in results.plan.jobs({}):
        kind, regime, arm, seed, rate = job.key
        count = counts.setdefault((regime, kind), [0, 0])
        count[1] += 1
        count[0] += (kind, regime, arm, seed, rate if kind in ("pilot", "tune") else "") not in done
    lines = [
        f"{regime}: {count} of {of} {'runs' if kind in RUNS else 'jobs'} `{kind}`"
        for (regime, kind), (count, of) in counts.items()
        if count and kind != "start"
    ]
    return lines or ["Nothing."]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"
