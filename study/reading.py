"""How far the second study's figures carry: pass@k, learning rates, power, what hard selections pick, and how the
alignment correlates with the outcome. Chosen after the rows were there, and exploratory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipe.marked_text import table
from study.arms import ARMS
from study.plan import BOUND, CONTRASTS, NO_ARM, RegimePlan
from study.report_tables import EXPLORATORY, best_rate, counted
from study.results import BASELINE, Results, Row
from study.selections import KINDS, SELECTIONS
from study.statistics import correlation_interval, detectable, equivalence_power, paired, pass_at
from study.tables import interval, number, p_value, signed

PASSES = (1, 2, 4, 8)
LEVEL = 0.05
ORACLE = "oracle"


def reading(results: Results, regime: RegimePlan) -> list[str]:
    """The section of the first regime, for the arms whose planned seeds are all there."""
    if not results.against_baseline(regime):
        return []
    parts = [*pass_table(results, regime), *_oracle(results, regime), *_rates(results, regime)]
    parts += [*_power(results, regime), *selection_table(results, regime), *screen(results, regime)]
    title = "## How far these figures carry"
    return [title, "", "Looked at when the rows were there; exploratory, without correction.", "", *parts]


def passes(row: Row, samples: int, k: int) -> float:
    """pass@k of a run, mean over both evaluations."""
    return float(np.mean([pass_at([int(digit) for digit in row[name]], samples, k) for name in ("right_1", "right_2")]))


def pass_table(results: Results, regime: RegimePlan) -> list[str]:
    """pass@k of the main arms against the baseline."""
    samples, base = results.plan.run.samples, results.runs("main", regime.name, BASELINE)
    counts = [k for k in PASSES if k <= samples]
    shares = [f"{100 * np.mean([passes(row, samples, k) for row in base.values()]):.1f} %" for k in counts]
    cells, level = [[ARMS[BASELINE].label, "", *shares]], []
    for contrast in results.against_baseline(regime):
        own = results.runs("main", regime.name, contrast.arm)
        differences = [
            paired([passes(own[seed], samples, k) - passes(base[seed], samples, k) for seed in contrast.seeds])
            for k in counts
        ]
        rate = f"{results.rate(regime, contrast.arm):g}"
        cells.append([ARMS[contrast.arm].label, rate, *(interval(difference, 100) for difference in differences)])
        if differences[0].low > 0 and contrast.arm != ORACLE:
            level.append((differences[0], differences[-1]))
    cells[0][1] = f"{results.rate(regime, BASELINE):g}"
    smaller = [f"{signed(100 * last.mean)}" for _, last in level]
    lines = []
    if level and not any(last.low > 0 for _, last in level):
        lines = [
            f"**At pass@{counts[-1]} no arm but the oracle is shown to be above uniform.** The {len(level)} others whose "
            f"interval at pass@1 is above 0 are at {', '.join(smaller)} there.",
            "",
        ]
    random_token = results.contrast(regime, CONTRASTS[-1][1], BASELINE)
    if random_token is not None and random_token.complete:
        seeds = f"{random_token.above} of {len(random_token.seeds)} seeds"
        lines += [f"The control of the last comparison, a random token, is above uniform on {seeds}.", ""]
    head = ["against uniform, points", "rate", *[f"pass@{k}" for k in counts]]
    note = f"Of {samples} samples at temperature {results.plan.run.temperature:g}, mean of both evaluations."
    return [*lines, *table(head, cells, right=1), "", note, ""]


def _oracle(results: Results, regime: RegimePlan) -> list[str]:
    """The reserves of the oracle's difference."""
    contrast = results.contrast(regime, ORACLE, BASELINE)
    if contrast is None or not contrast.complete:
        return []
    own, base = (f"{results.rate(regime, arm):g}" for arm in (ORACLE, BASELINE))
    one = _per_seed(results, NO_ARM, "groups of one outcome", "groups")
    share = f" (before training {min(one):.0f} to {max(one):.0f} % of the groups)" if one else ""
    return [
        f"**The oracle's {signed(100 * contrast.paired.mean)} is no measure of credit by token alone.** No control has its "
        f"distribution over token types. It alone learns from groups with one outcome{share}. It trains at {own}, uniform at "
        f"{base}.",
        "",
    ]


def _rates(results: Results, regime: RegimePlan) -> list[str]:
    """Which differences compare learning rates too."""
    plan, seed = results.plan, regime.tuning_seeds[0]
    pairs = [(arm.name, BASELINE) for arm in plan.arms(regime) if arm.name != BASELINE]
    pairs += [pair for pair in (*CONTRASTS, *EXPLORATORY) if pair[1] != BASELINE]
    mixed = [
        f"{ARMS[arm].label} - {ARMS[reference].label}"
        for arm, reference in pairs
        if results.complete(regime, arm)
        and results.complete(regime, reference)
        and results.rate(regime, arm) != results.rate(regime, reference)
    ]
    changed = []
    for arm in plan.arms(regime):
        runs = [*results.rows["tune"], *results.rows["pilot"]]
        accuracy = {
            float(row["rate"]): float(row["accuracy"])
            for row in runs
            if (row["regime"], row["arm"], row["seed"]) == (regime.name, arm.name, str(seed))
        }
        if len(accuracy) == len(plan.rates) and best_rate(accuracy) != results.rate(regime, arm.name):
            changed.append(f"{arm.label} ({best_rate(accuracy):g})")
    lines = []
    if mixed:
        lines.append(f"**Differences that compare learning rates as well as methods**: {'; '.join(mixed)}.")
    if changed and len(regime.tuning_seeds) > 1:
        lines.append(
            f"The compared arms and the others were not tuned alike: {counted(len(regime.tuning_seeds), 'seed')} against one. "
            f"By seed {seed} alone these would have another rate: {', '.join(changed)}."
        )
    return [" ".join(lines), ""] if lines else []


def _power(results: Results, regime: RegimePlan) -> list[str]:
    """What the plan's comparisons could have found at the spread that they have."""
    cells, equivalences = [], []
    for arm, reference in CONTRASTS:
        contrast = results.contrast(regime, arm, reference)
        if contrast is None or not contrast.complete:
            return []
        deviation, count = 100 * contrast.paired.deviation, len(contrast.seeds)
        cells.append(
            [
                f"{ARMS[arm].label} - {ARMS[reference].label}",
                f"{deviation:.1f}",
                f"{detectable(deviation, count, LEVEL / len(CONTRASTS)):.1f}",
                number(equivalence_power(deviation, count, 100 * BOUND)),
            ]
        )
        if contrast.paired.p >= LEVEL and contrast.equivalence < LEVEL:
            equivalences.append(contrast.equivalence)
    head = ["power at the deviation as found", "deviation, points", "found with probability 0.8, points"]
    head.append(f"probability to conclude level within {100 * BOUND:g} where there is no difference")
    lines = [
        *table(head, cells, right=1),
        "",
        "At the strictest of Holm's steps; the plan had assumed a smaller deviation.",
    ]
    if len(equivalences) > 1:
        highest = max(len(equivalences) * min(equivalences), *equivalences)
        lines[-1] += (
            f" With a correction for the {len(equivalences)} equivalences that were concluded (Holm), the smaller p is "
            f"{p_value(len(equivalences) * min(equivalences))}: {'not ' * (highest >= LEVEL)}below {LEVEL:g}."
        )
    return [*lines, ""]


def selection_table(results: Results, regime: RegimePlan) -> list[str]:
    """What the hard selections pick."""
    rows = [row for row in results.selections if row["regime"] == regime.name]
    if not rows:
        return []
    cells = []
    for arm in SELECTIONS:
        shares = [_per_seed(results, arm, kind, "rows") for kind in KINDS]
        count = sum(int(float(row["value"])) for row in rows if (row["arm"], row["figure"]) == (arm, "rows"))
        surprisal = _mean(rows, arm, "median surprisal")
        cells.append([ARMS[arm].label, str(count), *map(_spread, shares), f"{surprisal:.2f}"])
    models = counted(len({row["seed"] for row in rows}), "warmed-up model")
    same = all(
        results.starts(regime, [int(row["seed"])], "accuracy") == [float(row["value"])]
        for row in rows
        if (row["arm"], row["figure"]) == (NO_ARM, "accuracy")
    )
    dates = " and ".join(sorted({row["date"] for row in rows}))
    made = "as accurate as the recorded ones" if same else "which differ from the recorded ones"
    title = (
        f"What hard selections pick, in wrong rows of groups with both outcomes; {models}, made again {dates}, {made}:"
    )
    head = ["share of picks, % (lowest and highest model)", "rows", "the first error", "filler", "an aside"]
    head += ["another result", "other", "median surprisal, nats"]
    error = _mean(rows, NO_ARM, "median surprisal of the error")
    tokens, entropy = (_mean(rows, NO_ARM, f"share of {name} in filler and asides") for name in ("tokens", "entropy"))
    return [
        title,
        "",
        *table(head, cells, right=1),
        "",
        f"**So the comparison of the least likely with a random token did not test the error's place**: neither arm is "
        f"there often. The error's own median surprisal is {error:.2f} nats: a misconception is likely to the model. "
        f"Surprisal's AUROC below is among *result* tokens, the arm picks among all reasoning tokens.",
        "",
        f"**The task favours some arms by construction**: filler, and asides that no step uses, are {100 * tokens:.0f} % of "
        f"the tokens and hold {100 * entropy:.0f} % of the entropy, and decide nothing. Weights that grow with entropy or "
        f"surprisal fall there, `high_entropy` first of all; a weight by token type avoids them.",
        "",
    ]


def screen(results: Results, regime: RegimePlan) -> list[str]:
    """Correlation of the alignment before training with the outcome."""
    rows = [row for row in results.rows["alignment"] if row["regime"] == regime.name]
    base = {row["seed"]: float(row["gain"]) for row in rows if row["measured"] == BASELINE}
    points = {}
    for arm in results.plan.arms(regime):
        own = [row for row in rows if row["measured"] == arm.name]
        ratios = [float(row["gain"]) / base[row["seed"]] for row in own if base.get(row["seed"])]
        if ratios and results.complete(regime, arm.name):
            accuracy = [float(row["accuracy"]) for row in results.runs("main", regime.name, arm.name).values()]
            points[arm.name] = (float(np.mean(ratios)), float(np.mean(accuracy)))
    if len(points) < 5:
        return []
    gains, outcomes = zip(*points.values(), strict=True)
    r, low, high = correlation_interval(gains, outcomes)
    without = ""
    if ORACLE in points:
        others = [point for arm, point in points.items() if arm != ORACLE]
        without = f"; without the oracle {correlation_interval(*zip(*others, strict=True))[0]:.2f}"
    return [
        f"The alignment before training: over {len(points)} arms the gain of one update, over uniform's, "
        f"correlates with the accuracy after training: r = {r:.2f} [{low:.2f}, {high:.2f}]{without}. It was found on the "
        "arms that it was computed from, and it did not transfer: in the third study, without the random mask, r = 0.47.",
        "",
    ]


def _per_seed(results: Results, arm: str, part: str, whole: str) -> list[float]:
    """Per cent that one figure of an arm is of another, by seed."""
    values = {(row["seed"], row["figure"]): float(row["value"]) for row in results.selections if row["arm"] == arm}
    return [100 * values[seed, part] / value for (seed, figure), value in values.items() if figure == whole]


def _mean(rows: Sequence[Row], arm: str, figure: str) -> float:
    return float(np.mean([float(row["value"]) for row in rows if (row["arm"], row["figure"]) == (arm, figure)]))


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.0f} ({min(values):.0f}, {max(values):.0f})"
