"""The report of the second study, ``REPORT.md`` and its plot, from its raw files alone: the same files give the same page to
the last byte.

No sentence of the conclusions is written by hand. A contrast is judged once all planned seeds of both arms are there; until
then an arm shows how many of its seeds are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grail_advantage.view.whole_file import write_whole
from recipe.marked_text import table
from study.arms import ARMS
from study.plan import BOUND, COMPARED, CONTRASTS, RUNS, RegimePlan, StudyPlan
from study.reading import reading
from study.report_tables import (
    alignment_table,
    counted,
    main_tables,
    percent,
    pilot_table,
    side_tables,
    truth_table,
    tuning_table,
)
from study.results import BASELINE, Contrast, Results, compared
from study.statistics import holm, t_interval
from study.tables import interval, p_value, pyplot, signed
from study.work import Files

LEVEL = 0.05
PLOT = "differences.png"
AMOUNT_OR_PLACE = ("random_token", "spread")
LEVELLED = f"level within {100 * BOUND:g}"
WITHDRAWN = """**Withdrawn, 2026-11-23.** A review recomputed the rows: the figures agree, some statements do not
hold.

- "Level within 1.5 points": the two equivalence tests do not survive a correction for both (p 0.056). GRAIL and OAR-G
  are *not shown* to differ from `uniform`, and the least likely token not from a random one; no equivalence is shown.
- The alignment as a screen of arms (r = 0.96): it did not transfer to the [third study](../study3/REPORT.md), r =
  0.47 without the random mask.
- Everything that the page said of a [real model](real_model.md): its yardstick was the gradient of the same problems.
- The arm "exact token advantage (oracle)" also learns from groups with one outcome. On the same groups it is not
  shown to beat correct responses alone ([third study](../study3/REPORT.md): +1.1 [-4.8, +7.0]).

A run is 48 optimiser steps on 12 rollout batches: four epochs a batch, clipped, without a dual clip. Nothing here
reaches beyond that."""
NAMED = 5
"""Of more arms on one side of uniform, the conclusions give the number."""


def write_report(plan: StudyPlan, files: Files, folder: Path) -> list[Path]:
    """Write the report and its plot, where there is something to draw, and return their paths."""
    results = Results.read(plan, files)
    write_whole(folder / "REPORT.md", markdown(results))
    return [folder / "REPORT.md", *plot_differences(results, folder / PLOT)]


def markdown(results: Results) -> str:
    """The report as a Markdown page."""
    lines = ["# The second study: which weighting helps, and why", "", WITHDRAWN, "", "## Conclusions", ""]
    lines += [f"- {line}" for line in conclusions(results)]
    lines += [
        "",
        "The question, the outcome and the comparisons were fixed [before](PLAN.md). All other figures are exploratory.",
        "Before quoting any of them, see [how far they carry](#how-far-these-figures-carry).",
        "Measurements on a real model, and the command for a GPU: [real_model.md](real_model.md).",
        "",
    ]
    if drawn(results):
        lines += [f"![Difference from uniform by arm and regime]({PLOT})", ""]
    lines += reading(results, results.plan.regimes[0])
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
    """By regime the main arms whose planned seeds are all there, against uniform; regimes with one such arm are left out."""
    by_regime = {regime.name: results.against_baseline(regime) for regime in results.plan.regimes}
    return {name: contrasts for name, contrasts in by_regime.items() if len(contrasts) > 1}


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
    pairs = compared(results)
    if not pairs:
        done = {arm: len(results.runs("main", primary.name, arm)) for arm in COMPARED}
        counts = ", ".join(f"{ARMS[arm].label} {count}" for arm, count in done.items())
        planned = len(primary.main_seeds)
        return [
            f"**Nothing is concluded yet.** Of {planned} planned seeds of the regime {primary.name} there are: {counts}."
        ]
    lines = [_sentence(contrast, p) for contrast, p in pairs]
    by_pair = {(c.arm, c.reference): _verdict(c, p) for c, p in pairs}
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
        }.get(placed, "it is not shown to differ")
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
            f"tuning seed) {_ranked(results, regime, others)}."
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
    tuned = counted(len(regime.tuning_seeds), "tuning seed")
    share = f"of {planned} arms" if len(contrasts) == planned else f"{len(contrasts)} of {planned} arms complete"
    sentences = f"{share} ({corrected}; learning rates from {tuned}), {_ranked(results, regime, contrasts)}."
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


def _ranked(results: Results, regime: RegimePlan, contrasts: Sequence[Contrast]) -> str:
    corrected = holm([contrast.paired.p for contrast in contrasts])
    sides: dict[str, list[Contrast]] = {"above": [], "below": [], "not told from": []}
    for contrast, p in sorted(zip(contrasts, corrected, strict=True), key=lambda pair: -pair[0].paired.mean):
        side = ("above" if contrast.paired.mean > 0 else "below") if p < LEVEL else "not told from"
        sides[side].append(contrast)
    return "; ".join(f"{side} uniform: {_listed(results, regime, those)}" for side, those in sides.items() if those)


def _listed(results: Results, regime: RegimePlan, contrasts: Sequence[Contrast]) -> str:
    """With their mean differences, and rates other than the baseline's, from the highest to the lowest; of many their
    number."""
    means = []
    for contrast in contrasts:
        rate = results.rate(regime, contrast.arm)
        other = f", at rate {rate:g}" if rate != results.rate(regime, BASELINE) and len(contrasts) <= NAMED else ""
        means.append(f"{signed(100 * contrast.paired.mean)}{other}")
    if len(contrasts) > NAMED:
        return f"{len(contrasts)} arms ({means[-1]} to {means[0]})"
    return ", ".join(f"{ARMS[contrast.arm].label} ({mean})" for contrast, mean in zip(contrasts, means, strict=True))


def contrast_table(results: Results) -> list[str]:
    """The plan's comparisons as a short Markdown table; empty before all of their seeds are there."""
    rows = [
        [
            f"{ARMS[contrast.arm].label}, against {ARMS[contrast.reference].label}",
            signed(100 * contrast.paired.mean),
            f"{signed(100 * contrast.paired.low)} to {signed(100 * contrast.paired.high)}",
            p_value(p),
            _so(contrast, p),
        ]
        for contrast, p in compared(results)
    ]
    head = ["accuracy, points", "difference", "95 % interval", "p, Holm", "so"]
    return table(head, rows, right=1) if rows else []


def _so(contrast: Contrast, p: float) -> str:
    verdict = _verdict(contrast, p)
    return verdict if verdict in ("better", "worse") else "no difference shown"


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
        by = (
            f"the planned, uncorrected test of equivalence within {100 * BOUND:g} has p {p_value(contrast.equivalence)}"
        )
        return f"{title}: not shown to differ ({by}; [with a correction](#how-far-these-figures-carry))."
    return f"{title}: nothing is shown, neither a difference nor that there is none beyond {100 * BOUND:g} points."


def _regime(results: Results, regime: RegimePlan) -> list[str]:
    lines = [f"## Regime {regime.name}", ""]
    right = [results.starts(regime, regime.main_seeds, f"accuracy{name}") for name in ("", "_hot", "_greedy")]
    if right[0]:
        cells = [percent(values) for values in right]
        lines += [
            f"Right before training, %: {cells[0]} at temperature {results.plan.run.temperature:g}, {cells[1]} at 1, "
            f"{cells[2]} greedily.",
            "",
        ]
    if regime is not results.plan.regimes[0] and (exploratory := _exploratory(results, regime)):
        lines += [f"Exploratory: {exploratory}", ""]
    for tables in (main_tables, side_tables, tuning_table, pilot_table, alignment_table, truth_table):
        lines += tables(results, regime)
    return [*lines, "Nothing has been run.", ""] if len(lines) == 2 else lines


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
