"""The study's report: ``REPORT.md``, ``runs.csv``, ``curves.csv``, ``truth.csv`` and two plots, made from the raw files alone.

No sentence of the conclusions is written by hand. Each follows from an interval by one rule: an interval that lies on one side
of zero is reported as a difference, in either direction; one that contains zero as "no difference could be shown"; and
with fewer than ``MIN_SEEDS`` seeds nothing is concluded.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage import GrailConfig, OarConfig
from recipe.evaluate.files import write_text
from study.saliency_truth import BASELINES, METRICS
from study.statistics import (
    BASELINE,
    LAST_EVALUATIONS,
    LAST_STEPS,
    TARGET_SHARE,
    Difference,
    Run,
    RunFigures,
    compare,
    compare_ratio,
    compare_steps,
    false_alarm_rate,
    figures,
    missing_runs,
    not_comparable,
    read_runs,
    restricted_steps,
    steps_to_accuracy,
    target_accuracy,
)

PARENT = "grail_official"
"""The arm that ablations change one option of; arms are compared with it beside the baseline."""
MIN_SEEDS = 5
"""Below this, an interval that excludes zero is no ground for a conclusion: see ``statistics.false_alarm_rate``."""
QUESTION = (
    "Does it train a model better to weight the tokens of a response, by GRAIL or another method, than to weight them all "
    "alike, as GRPO does? Arms differ in their token weights; settings in which they differ otherwise are listed below."
)
CURVES_FILE, FOREST_FILE = "learning_curves.png", "differences.png"
_COMPARED = {"final_accuracy": "final accuracy", "area": "area under the curve", "final_pass": "final pass@3"}
_ABSENT = "-"
_GROUPS = ("baseline", "main", "control", "ablation")
_COLORS = ("#3d5a80", "#0b6e4f", "#c8553d", "#8a5a9e", "#b8860b", "#2a9d8f", "#6d4c41", "#9aa5b1")


@dataclass(frozen=True)
class Arm:
    """The runs of one arm."""

    name: str
    label: str
    group: str
    runs: list[Run]

    @property
    def figures(self) -> list[RunFigures]:
        return [figures(run) for run in self.runs]


def write_report(
    raw_dir: Path,
    output_dir: Path,
    header: Mapping[str, Any],
    *,
    truth_path: Path | None = None,
    expected: Sequence[tuple[str, int]] = (),
) -> list[Path]:
    """Write the whole report and return its files, ``REPORT.md`` first.

    Args:
        raw_dir: folder of the runs' files.
        output_dir: made if it is not there.
        header: shown as a table in its order: command, hardware, versions, total compute time, date. Values may be mappings.
            The key ``question`` takes the place of the standard question.
        truth_path: JSON file with the results of :func:`study.saliency_truth.measure` by model name (``trained``,
            ``warmed-up``, ``untrained``); the conclusions speak of the first.
        expected: all ``(arm, seed)`` that the study was to run; those that are not there are named in the report.

    Raises:
        ValueError: no run in ``raw_dir``, or a damaged file.
    """
    runs = read_runs(raw_dir)
    truth = read_truth(truth_path)
    texts = {
        "REPORT.md": markdown(runs, header, truth=truth, expected=expected),
        "runs.csv": _runs_csv(runs),
        "curves.csv": _curves_csv(runs),
    }
    if truth:
        texts["truth.csv"] = _truth_csv(truth)
    paths = []
    for name, text in texts.items():
        write_text(output_dir / name, text)
        paths.append(output_dir / name)
    plot_curves(runs, output_dir / CURVES_FILE)
    plot_differences(runs, output_dir / FOREST_FILE)
    return [*paths, output_dir / CURVES_FILE, output_dir / FOREST_FILE]


def read_truth(path: Path | None) -> dict[str, Any]:
    """The ground truth's figures by model name; none without a file."""
    if path is None:
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); measure the ground truth again") from None


def arms_of(runs: Sequence[Run], *groups: str) -> list[Arm]:
    """Arms with their runs: baselines, main arms, controls, ablations; of the groups named, or of all."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.arm, []).append(run)
    arms = [Arm(name, found[0].label, found[0].group, found) for name, found in by_name.items()]
    arms = [arm for arm in arms if not groups or arm.group in groups]
    return sorted(arms, key=lambda arm: (_GROUPS.index(arm.group) if arm.group in _GROUPS else len(_GROUPS), arm.name))


# Conclusions


def conclusions(runs: Sequence[Run], truth: Mapping[str, Any] | None = None) -> list[str]:
    """At most five sentences, each by rule from intervals; see the module's docstring."""
    if not any(run.arm == BASELINE for run in runs):
        return [f"There is no run of {BASELINE}, so nothing could be compared."]
    main = [arm for arm in arms_of(runs) if arm.group != "ablation" and arm.name != BASELINE]
    ablations = arms_of(runs, "ablation")
    lines = []
    if main:
        lines.append(_compared_sentence("Final accuracy", runs, main, "final_accuracy"))
        lines.append(_compared_sentence("Mean accuracy while training (area under the curve)", runs, main, "area"))
    if ablations:
        lines.append(_compared_sentence("Ablations, final accuracy", runs, ablations, "final_accuracy"))
    if truth:
        lines.append(_truth_sentence(truth))
    cost = _cost_sentence(runs, main or ablations)
    return [*lines, cost] if cost else lines


def _compared_sentence(title: str, runs: Sequence[Run], arms: Sequence[Arm], figure: str) -> str:
    """All arms against the baseline in one figure, sorted by what their intervals say."""
    verdicts: dict[str, list[str]] = {}
    seeds = set()
    for arm in arms:
        difference = compare(runs, arm.name, figure)
        verdicts.setdefault(verdict(difference), []).append(
            arm.label if difference is None else f"{arm.label} ({_points(difference)})"
        )
        if difference is not None:
            seeds.add(len(difference.seeds))
    parts = [f"{name}: {', '.join(verdicts[name])}" for name in _VERDICTS if name in verdicts]
    over = f", points, 95 % intervals over {_span(seeds)}" if seeds else ""
    return f"{title} against GRPO{over}. {'; '.join(parts)}."


_ABOVE, _BELOW, _OPEN = "Above it", "Below it", "No difference could be shown"
_FEW, _NONE = f"Fewer than {MIN_SEEDS} seeds, so nothing is concluded", "No seed in common"
_VERDICTS = (_ABOVE, _BELOW, _OPEN, _FEW, _NONE)


def verdict(difference: Difference | None) -> str:
    """What may be said of a difference."""
    if difference is None:
        return _NONE
    if len(difference.seeds) < MIN_SEEDS:
        return _FEW
    return {1: _ABOVE, -1: _BELOW, 0: _OPEN}[difference.sign]


def _truth_sentence(truth: Mapping[str, Any]) -> str:
    """Which methods rank the wrong tokens above chance, and above the latest tokens, on the first model of the file."""
    model, result = next(iter(truth.items()))
    text = f"Finding the wrong tokens (AUROC, {model} model, {result['used']} wrong responses)."
    for baseline, what in (("random", "a random order"), ("position", "taking the latest tokens first")):
        found: dict[str, list[str]] = {}
        for method in result["methods"].values():
            figure = None if method["baseline"] else method["minus"][baseline]["auroc"]
            if figure is not None and figure["low"] is not None:
                side = "better" if figure["low"] > 0 else "worse" if figure["high"] < 0 else "no difference shown"
                found.setdefault(side, []).append(method["label"])
        said = [
            f"{side}: {', '.join(found[side])}" for side in ("better", "worse", "no difference shown") if side in found
        ]
        text += f" Against {what}, {'; '.join(said) or 'nothing can be said'}."
    return text


def _cost_sentence(runs: Sequence[Run], arms: Sequence[Arm]) -> str | None:
    parts = []
    for arm in arms:
        ratio = compare_ratio(runs, arm.name, "seconds_step")
        if ratio is not None:
            parts.append(f"{arm.label} {_times(ratio)}")
    return f"Time of a training step as a multiple of GRPO's: {', '.join(parts)}." if parts else None


# Markdown


def markdown(
    runs: Sequence[Run],
    header: Mapping[str, Any],
    *,
    truth: Mapping[str, Any] | None = None,
    expected: Sequence[tuple[str, int]] = (),
) -> str:
    """The report as a Markdown page; arguments as for :func:`write_report`."""
    truth = truth or {}
    sections = [
        ["# Token weights compared", ""],
        ["## What was asked", "", str(header.get("question", QUESTION)), ""],
        _setup(runs, header, expected),
        _comparison("Main comparison", runs, arms_of(runs, "baseline", "main", "control")),
        [f"![Learning curves]({CURVES_FILE})", "", f"![Paired differences]({FOREST_FILE})", ""],
        _comparison("Ablations", runs, arms_of(runs, "ablation")),
        _truth_tables(truth),
        _costs(runs),
        ["## Conclusions", "", *[f"- {line}" for line in conclusions(runs, truth)], ""],
        _limitations(runs, truth),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _setup(runs: Sequence[Run], header: Mapping[str, Any], expected: Sequence[tuple[str, int]]) -> list[str]:
    rows = [[str(key), _plain(value)] for key, value in header.items() if key != "question"]
    known = [run.seconds for run in runs if run.seconds is not None]
    if known:
        rows.append([f"time of the {len(known)} runs together", f"{sum(known) / 3600:.2f} h"])
    problems = {len(evaluation.get("correct", ())) for run in runs for evaluation in run.evaluations}
    rows.append(["held-out problems", _range(problems)])
    common, differing = _split_settings(runs)
    rows += [[f"setting `{name}`", f"`{value}`"] for name, value in common.items()]
    versions = sorted({_plain(run.versions) for run in runs if run.versions})
    rows += [["versions of the runs", text] for text in versions]
    lines = ["## Set-up", "", *_table(["", ""], rows), ""]

    rows = []
    for arm in arms_of(runs):
        own = [
            f"`{name}`: {', '.join(sorted({_setting(run.settings.get(name)) for run in arm.runs}))}"
            for name in differing
        ]
        steps = {figure.last_step for figure in arm.figures}
        seeds = ", ".join(str(run.seed) for run in arm.runs)
        rows.append([arm.label, f"`{arm.name}`", arm.group, seeds, _range(steps), "; ".join(own)])
    lines += [*_table(["arm", "name", "group", "seeds", "steps", "settings that differ between runs"], rows), ""]

    missing = missing_runs(runs, expected)
    if missing:
        lines += ["Missing runs: " + ", ".join(f"`{arm}` seed {seed}" for arm, seed in missing) + ".", ""]
    for arm in arms_of(runs):
        seeds = not_comparable(runs, arm.name)
        if seeds:
            lines += [
                f"Not compared: `{arm.name}` seed {', '.join(map(str, seeds))}, evaluated at other steps or on another "
                f"number of problems than `{BASELINE}`.",
                "",
            ]
    return lines


def _setting(value: Any) -> str:
    """A setting as text; of an arm's description only what is not at its default."""
    if not isinstance(value, Mapping) or "weights" not in value:
        return str(value)
    parts = [f"{name} {value[name]}" for name in ("control", "advantage", "loss_agg_mode") if value.get(name)]
    options = value["weights"]
    if options is not None:
        grail = value["method"] == "GrailConfig"
        base = GrailConfig(options["preset"]) if grail else OarConfig(options["method"])
        named = f"preset={options['preset']}" if grail else f"method={options['method']}"
        changed = [f"{name}={option}" for name, option in options.items() if getattr(base, name) != option]
        parts.insert(0, f"{value['method']}({', '.join([named, *changed])})")
    return ", ".join(parts)


def _split_settings(runs: Sequence[Run]) -> tuple[dict[str, str], list[str]]:
    """Settings that all runs share, and the names of those in which any two differ, the seed apart."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings if name != "seed"))
    values = {name: {json.dumps(run.settings.get(name), sort_keys=True) for run in runs} for name in names}
    common = {name: str(runs[0].settings.get(name)) for name in names if len(values[name]) == 1}
    return common, [name for name in names if len(values[name]) > 1]


def _comparison(title: str, runs: Sequence[Run], arms: Sequence[Arm]) -> list[str]:
    lines = [f"## {title}", ""]
    if not arms:
        return [*lines, "No such run.", ""]
    target = target_accuracy(runs)
    horizon = min(run.evaluations[-1]["step"] for run in runs)
    head = ["arm", "seeds", "accuracy at the start, %", "final accuracy, %", "area, %", "final pass@3, %"]
    head += ["response tokens", "entropy"]
    if target is not None:
        head.append(f"steps to {100 * target:.1f} %")
    rows = []
    for arm in arms:
        found = arm.figures
        row = [arm.label, str(len(found))]
        row += [_spread(found, name, 100, 1) for name in ("start_accuracy", "final_accuracy", "area", "final_pass")]
        row += [_spread(found, "response_length", 1, 1), _spread(found, "entropy", 1, 3)]
        if target is not None:
            steps, never = restricted_steps(arm.runs, target, horizon)
            row.append(f"{steps:.1f}" + (f" ({never} of {len(found)} never)" if never else ""))
        rows.append(row)
    lines += [*_table(head, rows, right=1), "", "Mean ± standard deviation over seeds.", ""]

    others = [arm for arm in arms if arm.name != BASELINE]
    lines += _differences(runs, others, BASELINE, target)
    lines += [f"- {arm.label}, {_COMPARED['final_accuracy']}: {_sentence(runs, arm)}" for arm in others]
    lines += ["", *_differences(runs, [arm for arm in others if arm.name != PARENT], PARENT, target)]
    return lines


def _differences(runs: Sequence[Run], arms: Sequence[Arm], reference: str, target: float | None) -> list[str]:
    """Table of the arms' paired differences from one of them; nothing where that has no run."""
    label = next((run.label for run in runs if run.arm == reference), None)
    if label is None or not arms:
        return []
    head = [f"arm minus {label}", "seeds"]
    head += [part for name in _COMPARED.values() for part in (f"{name}, points", "p")]
    if target is not None:
        head += [f"steps to {100 * target:.1f} %"]
    rows = []
    for arm in arms:
        differences = [compare(runs, arm.name, figure, reference) for figure in _COMPARED]
        row = [arm.label, str(len(differences[0].seeds)) if differences[0] else "0"]
        for difference in differences:
            row += [_ABSENT, _ABSENT] if difference is None else [_points(difference), _p(difference)]
        if target is not None:
            steps = compare_steps(runs, arm.name, target, reference)
            row.append(_ABSENT if steps is None else _bracketed(steps, 1, 1))
        rows.append(row)
    return [*_table(head, rows, right=1), ""]


def _sentence(runs: Sequence[Run], arm: Arm) -> str:
    difference = compare(runs, arm.name, "final_accuracy")
    said = verdict(difference)
    if said in (_ABOVE, _BELOW):
        return f"{said.split()[0].lower()} GRPO, {_points(difference)} points."
    if said == _OPEN:
        return f"no difference could be shown, {_points(difference)} points."
    return f"{said[0].lower()}{said[1:]}."


def _truth_tables(truth: Mapping[str, Any]) -> list[str]:
    lines = ["## Ground truth: do the scores find the wrong step?", ""]
    if not truth:
        return [*lines, "Not measured.", ""]
    for model, result in truth.items():
        left_out = ", ".join(f"{count} {reason}" for reason, count in result["left_out"].items() if count)
        lines += [
            f"### {model[0].upper()}{model[1:]} model",
            "",
            f"{result['used']} of {result['examples']} wrong responses"
            + (f" (left out: {left_out})" if left_out else "")
            + "; "
            f"on average {result['true_tokens']:.1f} of {result['reasoning_tokens']:.1f} reasoning tokens are true ones.",
            "",
        ]
        rows = []
        for method in result["methods"].values():
            cells = [_figure(method["metrics"][metric]) for metric in METRICS]
            short = method["responses"] < result["used"]
            rows.append([method["label"] + (f" ({method['responses']} responses)" if short else ""), *cells])
        lines += [*_table(["method", *METRICS.values()], rows, right=1), ""]
        rows = []
        for method in result["methods"].values():
            if not method["baseline"]:
                rows.append([method["label"], *[_figure(method["minus"][name]["auroc"], "+") for name in BASELINES]])
        head = ["AUROC minus that of", *[label.removeprefix("baseline: ") for label in BASELINES.values()]]
        lines += [*_table(head, rows, right=1), ""]
    lines += [
        "In brackets: 95 % bootstrap intervals over responses. Ties count with their expectation.",
        "",
    ]
    return lines


def _costs(runs: Sequence[Run]) -> list[str]:
    head = ["arm", "seconds a step", "of these for weights", "step as a multiple of GRPO's", "minutes a run"]
    head += ["responses with scores, %", "mean advantage scale"]
    rows = []
    for arm in arms_of(runs):
        ratio = compare_ratio(runs, arm.name, "seconds_step") if arm.name != BASELINE else None
        minutes = [run.seconds / 60 for run in arm.runs if run.seconds is not None]
        found = arm.figures
        rows.append(
            [
                arm.label,
                _spread(found, "seconds_step", 1, 2),
                _spread(found, "seconds_weights", 1, 2),
                _ABSENT if ratio is None else _times(ratio),
                f"{np.mean(minutes):.1f}" if minutes else _ABSENT,
                _spread(found, "selected_rate", 100, 1),
                _spread(found, "advantage_scale", 1, 3),
            ]
        )
    note = (
        "Seconds a step: median of a run, then mean ± standard deviation over seeds. Multiples: geometric mean over seeds. "
        "Advantage scale: how much larger token weights make the mean absolute token advantage; an arm far from 1 also takes "
        "larger or smaller steps."
    )
    return ["## Costs", "", *_table(head, rows, right=1), "", note, ""]


def _limitations(runs: Sequence[Run], truth: Mapping[str, Any]) -> list[str]:
    compared = [compare(runs, arm.name, "final_accuracy") for arm in arms_of(runs) if arm.name != BASELINE]
    with_interval = [difference for difference in compared if difference is not None and difference.low is not None]
    lines = [
        "- One task and one model, trained and evaluated here; nothing follows for larger models or other tasks.",
        f"- Final figures are means of the last {LAST_EVALUATIONS} evaluations after step 0; the area is divided by its steps; "
        f"response tokens and entropy are means of the last {LAST_STEPS} steps. The accuracy for the steps is "
        f"{100 * TARGET_SHARE:.0f} % of what GRPO gains on average; a run that never gets there counts as the last "
        "step that all runs have.",
        "- In brackets: 95 % bootstrap intervals of the mean paired difference, 10,000 resamples over seeds, percentiles "
        "widened for the number of seeds (expanded percentile interval). "
        "p: exact two-sided sign-flip test over seeds.",
    ]
    for seeds in sorted({len(difference.seeds) for difference in with_interval}):
        lines.append(
            f"- With {seeds} seeds such an interval excludes zero in {100 * false_alarm_rate(seeds):.0f} % of simulated "
            f"studies without any difference (normal noise); it should in 5 %. p cannot be below {2 / 2**seeds:.3g}."
        )
    if len(with_interval) > 1:
        lines.append(
            f"- {len(with_interval)} arms are compared with GRPO without a correction for their number; some intervals exclude "
            "zero by chance."
        )
    single = sorted({run.label for run in runs if sum(other.arm == run.arm for other in runs) == 1})
    if single:
        lines.append(f"- A single seed, so no interval: {', '.join(single)}.")
    if truth:
        lines.append(
            "- Ground truth: the first error of a response is its only true one, later errors count as innocent; responses to "
            "one problem count as independent."
        )
    lines.append("- Times are wall-clock times and depend on what else the machine did.")
    return ["## Limitations", "", *lines, ""]


# Formatting


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Lines of a Markdown table; columns from ``right`` on are set flush right."""
    rule = ["--:" if right is not None and column >= right else "---" for column in range(len(head))]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, Mapping) else str(value)


def _range(values: set[int]) -> str:
    return " to ".join(str(value) for value in sorted({min(values), max(values)}))


def _span(seeds: set[int]) -> str:
    return f"{_range(seeds)} seed{'' if seeds == {1} else 's'}"


def _spread(found: Sequence[RunFigures], name: str, scale: float, digits: int) -> str:
    values = [scale * getattr(figure, name) for figure in found if getattr(figure, name) is not None]
    if not values:
        return _ABSENT
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def _bracketed(difference: Difference, scale: float, digits: int) -> str:
    text = _signed(scale * difference.value, digits)
    if difference.low is None or difference.high is None:
        return f"{text}, no interval"
    return f"{text} [{_signed(scale * difference.low, digits)}, {_signed(scale * difference.high, digits)}]"


def _points(difference: Difference) -> str:
    return _bracketed(difference, 100, 1)


def _times(ratio: Difference) -> str:
    text = f"{ratio.value:.2f}"
    return text if ratio.low is None or ratio.high is None else f"{text} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _p(difference: Difference) -> str:
    return _ABSENT if difference.p_value is None else f"{difference.p_value:.3f}"


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.replace("-", "+") if float(text) == 0 else text


def _figure(figure: Mapping[str, Any] | None, sign: str = "") -> str:
    if figure is None:
        return _ABSENT
    value, low, high = (None if figure[key] is None else f"{figure[key]:{sign}.2f}" for key in ("value", "low", "high"))
    return f"{value}" if low is None else f"{value} [{low}, {high}]"


# Tables as CSV


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _runs_csv(runs: Sequence[Run]) -> str:
    target = target_accuracy(runs)
    rows = []
    for run in runs:
        row = {"arm": run.arm, "label": run.label, "group": run.group, "seed": run.seed, "seconds": run.seconds}
        row |= asdict(figures(run))
        row |= {
            "target_accuracy": target,
            "steps_to_target": None if target is None else steps_to_accuracy(run, target),
        }
        rows.append(row)
    return _csv(rows)


def _curves_csv(runs: Sequence[Run]) -> str:
    rows = [
        {
            "arm": run.arm,
            "seed": run.seed,
            "step": evaluation["step"],
            "accuracy": evaluation["accuracy"],
            "pass_at_3": evaluation["pass_at_3"],
        }
        for run in runs
        for evaluation in run.evaluations
    ]
    return _csv(rows)


def _truth_csv(truth: Mapping[str, Any]) -> str:
    empty = {"value": None, "low": None, "high": None, "responses": 0}
    rows = []
    for model, result in truth.items():
        for name, method in result["methods"].items():
            for minus, found in [("", method["metrics"]), *method["minus"].items()]:
                for metric in METRICS:
                    rows.append(
                        {"model": model, "method": name, "minus": minus, "metric": metric, **(found[metric] or empty)}
                    )
    return _csv(rows)


# Plots


def plot_curves(runs: Sequence[Run], path: Path) -> None:
    """Held-out accuracy by step: mean of each arm that is no ablation, and a band of one standard deviation over seeds."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for number, arm in enumerate(arm for arm in arms_of(runs) if arm.group != "ablation"):
        steps, accuracies_RE = curves(arm.runs)
        color = _COLORS[number % len(_COLORS)]
        mean_E = 100 * accuracies_RE.mean(axis=0)
        axes.plot(steps, mean_E, color=color, marker="o", markersize=3, label=f"{arm.label} ({len(arm.runs)})")
        if len(arm.runs) > 1:
            deviation_E = 100 * accuracies_RE.std(axis=0, ddof=1)
            axes.fill_between(steps, mean_E - deviation_E, mean_E + deviation_E, color=color, alpha=0.08, linewidth=0)
    axes.set(
        xlabel="step", ylabel="held-out accuracy, %", title="Mean ± standard deviation over seeds (number of seeds)"
    )
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def curves(runs: Sequence[Run]) -> tuple[list[int], np.ndarray]:
    """Steps at which every run was evaluated, and accuracies of shape (runs, steps)."""
    by_step = [{evaluation["step"]: evaluation["accuracy"] for evaluation in run.evaluations} for run in runs]
    steps = sorted(set.intersection(*(set(found) for found in by_step)))
    return steps, np.array([[found[step] for step in steps] for found in by_step])


def plot_differences(runs: Sequence[Run], path: Path) -> None:
    """Forest plot: paired differences to GRPO of every arm with their 95 % intervals."""
    pyplot = _pyplot()
    arms = [arm for arm in arms_of(runs) if arm.name != BASELINE]
    heights = np.arange(len(arms))[::-1]
    figure, panels = pyplot.subplots(
        1, len(_COMPARED), figsize=(12, 1.8 + 0.4 * len(arms)), dpi=120, sharey=True, layout="constrained"
    )
    for axes, (name, label), color in zip(panels, _COMPARED.items(), _COLORS, strict=False):
        for height, arm in zip(heights, arms, strict=True):
            difference = compare(runs, arm.name, name)
            if difference is None:
                continue
            axes.plot(100 * difference.value, height, "o", color=color, markersize=5)
            if difference.low is not None and difference.high is not None:
                axes.plot([100 * difference.low, 100 * difference.high], [height, height], color=color, linewidth=1.5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=f"{label}, arm - GRPO, points", ylim=(-0.7, max(len(arms), 1) - 0.3))
        axes.grid(axis="x", alpha=0.3)
    seeds = [len(found.seeds) if (found := compare(runs, arm.name, "final_accuracy")) else 0 for arm in arms]
    panels[0].set_yticks(heights, [f"{arm.label} ({count})" for arm, count in zip(arms, seeds, strict=True)])
    figure.suptitle("Paired differences, 95 % intervals over seeds (number of seeds)", fontsize=11)
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
