"""The page of the third study, ``docs/study3/REPORT.md``, from its raw rows alone; its rules are those of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from grail_advantage.view.whole_file import write_whole
from recipe.marked_text import table
from study.arms import ARMS
from study.plan import RegimePlan, StudyPlan
from study.plan3 import CONTRASTS_3, SMALL
from study.reading import passes
from study.report_tables import alignment_table, percent, tuning_table
from study.results import BASELINE, Contrast, Results
from study.statistics import holm, paired
from study.tables import ABSENT, interval, p_value
from study.work import Files

LEVEL = 0.05
MASK, ITS_CONTROL = "results_mask", "random_mask"
SEEN_LATER = (("oracle_mixed", "right_only"), ("oracle_mixed", "results_mask"), ("error_place", "right_only"))
"""Differences that explain the planned ones and were chosen with the rows in sight. ``oracle_mixed`` learns from the
same groups as the others; ``oracle`` also from those with one outcome."""
FLAWED = {"choices": {"oracle", "results_mask"}}
"""By task, arms whose rows answer no question there: the oracle's advantages are wrong, and the mask gives the words
that decide no gradient."""
WITHDRAWN = """**Withdrawn, 2026-11-23.** A review recomputed the rows: the figures agree, some statements do not
hold.

- **The oracle on *choices* is wrong**, and with it every comparison of it there (-2.2, -3.1, +4.1, +40.2).
  When these rows were made, `study/exact.py` took the probability of the deciding word over the whole vocabulary, so
  that filler or an aside at that place, a free choice, counted as failure. For a policy that is never wrong it gave an
  accuracy of 0.116, where 1 is right (on *misconceptions* it gave 1). Before training it said 7 % where sampling gives
  29 %. It takes the probability among the two words now; the rows were not made again.
- **The mask on *choices*** gives the words that decide no gradient: -42.4 and +40.2 are built in. So the rule on the
  oracle and the mask has one usable task, not two.
- **"Oracle - right rows only, +6.7"** compares different data: the oracle also learns from groups with one outcome.
  On the same groups it is +1.1 [-4.8, +7.0]. The oracle above the mask by 8.0 has the same flaw; on the same groups
  it is +2.5 [-2.7, +7.8].
- "Nothing finer", "the oracle is no ceiling", "steps are nearly fine enough" and "token type is no recipe" do not
  follow. The mask is *not shown* to train better than right rows only; 80 % power to detect 9 points.

What was not said: the first wrong token differs from a random one in token type too (the control would be a random
result digit). Single runs of the mask and the oracle collapse outside the tokens that they credit: with the wording
given, the oracle on mixed groups is right on 77 % of seed 16 after training, mask and error on 44 % of seed 23, of
their own samples on 43 and 12 %. A run is 48 optimiser steps on 12 rollout batches: four epochs a batch, clipped,
without a dual clip."""
Judged = Mapping[tuple[str, str], tuple[Contrast, float]]
"""The primary comparisons with their corrected p-values."""


def write_third(plan: StudyPlan, files: Files, folder: Path) -> list[Path]:
    """Write the page and return its path."""
    results = Results.read(plan, files)
    write_whole(folder / "REPORT.md", page(results))
    return [folder / "REPORT.md"]


def page(results: Results) -> str:
    """The page as Markdown."""
    first, second = results.plan.regimes
    judged = primary(results, first)
    lines = ["# The third study: what perfect credit is made of", "", WITHDRAWN, "", "## Primary comparisons", ""]
    if judged:
        cells = []
        for pair, (contrast, p) in judged.items():
            figures = [interval(contrast.paired, 100), p_value(contrast.paired.p), p_value(p), _verdict(contrast, p)]
            repeated = "withdrawn" if FLAWED[second.name] & set(pair) else _points(results.contrast(second, *pair))
            figures += [repeated, _at_8_points(results, first, pair)]
            cells.append([_label(*pair), _rates(results, first, pair), *figures])
        head = ["points", "rates", "difference", "p", "p, Holm", "so", "second task", "pass@8"]
        lines += [*table(head, cells, right=2), ""]
        lines += [f"- {line}" for line in rules(results, judged)]
    else:
        lines.append("**Nothing is concluded yet**: not all planned seeds of the compared arms are there.")
    lines += ["", "Fixed [before](PLAN.md); all other figures are exploratory."]
    head = ["looked at afterwards, points", *(regime.name for regime in results.plan.regimes)]
    lines += ["", *table(head, seen_later(results), right=1), ""]
    for regime in results.plan.regimes:
        lines += [f"## Task {regime.name}", "", *arm_table(results, regime), ""]
        for tables in (tuning_table, alignment_table):
            lines += tables(results, regime)
    hours = sum(results.hours.values())
    lines.append(f"Processor time of the recorded jobs: {hours:.2f} of the plan's {results.plan.hours:g} core-hours.")
    return "\n".join(lines) + "\n"


def primary(results: Results, regime: RegimePlan) -> Judged:
    """The primary comparisons; none before all of their seeds are there."""
    contrasts = [results.contrast(regime, *pair) for pair in CONTRASTS_3]
    complete = [contrast for contrast in contrasts if contrast is not None and contrast.complete]
    if len(complete) < len(CONTRASTS_3):
        return {}
    corrected = holm([contrast.paired.p for contrast in complete])
    return dict(zip(CONTRASTS_3, zip(complete, corrected, strict=True), strict=True))


def rules(results: Results, judged: Judged) -> list[str]:
    """What the plan's rules say."""
    first = results.plan.regimes[0]
    size = "less than" if judged["oracle", MASK][0].paired.mean < SMALL else "at least"
    lines = [
        f"The oracle is {size} {100 * SMALL:g} points above the mask, with groups that the mask does not use; the second "
        "task's comparison is withdrawn, so that the rule is open."
    ]
    said = {
        "not decided": "The error's place was not shown to differ from a random one: no more localisers of wrong steps.",
        "better": "The error's place is better than a random one: localising wrong steps may pay.",
        "worse": "The error's place is worse than a random one: no more localisers of wrong steps.",
    }
    lines.append(said[_verdict(*judged["error_place", "random_token"])])
    control = results.contrast(first, MASK, ITS_CONTROL)
    if control is not None and control.complete:
        above = control.paired.mean > 0 and control.paired.p < LEVEL
        lines.append(
            f"The mask against its random control: {interval(control.paired, 100)} points, p {p_value(control.paired.p)}, at "
            f"pass@8 {_at_8_points(results, first, (MASK, ITS_CONTROL))}: "
            + ("above it." if above else "not shown to be above it; `pattern` is a control and recommended to nobody.")
        )
    above = _verdict(*judged["step_values", "right_only"]) == "better"
    beside = "recommended for experiments, beside right rows only" if above else "not recommended"
    lines.append(f"`step_values` is {beside}.")
    return lines


def seen_later(results: Results) -> list[list[str]]:
    """Rows of :data:`SEEN_LATER`, a column a task."""
    return [
        [_label(*pair), *(_points(results.contrast(regime, *pair)) for regime in results.plan.regimes)]
        for pair in SEEN_LATER
    ]


def arm_table(results: Results, regime: RegimePlan) -> list[str]:
    """Accuracy and pass@8 of every arm, and their differences from the baseline once all seeds are there."""
    base = _at_8(results, regime, BASELINE)
    flawed = FLAWED.get(regime.name, set())
    cells = []
    kinds = [(arm, "main") for arm in results.plan.arms(regime)]
    kinds += [(arm, "side") for arm in results.plan.side_arms if regime.side_seeds]
    for arm, kind in kinds:
        runs, planned = (
            results.runs(kind, regime.name, arm.name),
            regime.main_seeds if kind == "main" else regime.side_seeds,
        )
        if not runs.keys() >= set(planned):
            cells.append([arm.label, f"{len(runs)} of {len(planned)}", *[ABSENT] * 5])
            continue
        rate = " ".join(sorted({f"{float(row['rate']):g}" for row in runs.values()}))
        at_8 = _at_8(results, regime, arm.name, kind)
        contrast = results.contrast(regime, arm.name, BASELINE, kind) if arm.name != BASELINE else None
        known = contrast is not None and contrast.complete
        cells.append(
            [
                f"{arm.label}: withdrawn" if arm.name in flawed else arm.label,
                *(str(len(runs)), rate, percent([float(run["accuracy"]) for run in runs.values()])),
                *(_points(contrast), f"{100 * np.mean(list(at_8.values())):.1f}"),
                _difference(at_8, base) if known else ABSENT,
            ]
        )
    head = ["arm", "seeds", "rate", "accuracy, %", "against uniform, points", "pass@8, %", "against uniform, points"]
    return table(head, cells, right=1)


def _points(contrast: Contrast | None) -> str:
    return interval(contrast.paired, 100) if contrast is not None and contrast.complete else ABSENT


def _at_8(results: Results, regime: RegimePlan, arm: str, kind: str = "main") -> dict[int, float]:
    """pass@8 by seed."""
    return {
        seed: passes(row, results.plan.run.samples, 8) for seed, row in results.runs(kind, regime.name, arm).items()
    }


def _at_8_points(results: Results, regime: RegimePlan, pair: tuple[str, str]) -> str:
    own, other = (_at_8(results, regime, arm) for arm in pair)
    return _difference(own, other)


def _difference(own: Mapping[int, float], other: Mapping[int, float]) -> str:
    return interval(paired([value - other[seed] for seed, value in own.items() if seed in other]), 100)


def _label(arm: str, reference: str) -> str:
    return f"{ARMS[arm].label} - {ARMS[reference].label}"


def _rates(results: Results, regime: RegimePlan, pair: tuple[str, str]) -> str:
    return " / ".join(f"{results.rate(regime, arm):g}" for arm in pair)


def _verdict(contrast: Contrast, p: float) -> str:
    if p >= LEVEL:
        return "not decided"
    return "better" if contrast.paired.mean > 0 else "worse"
