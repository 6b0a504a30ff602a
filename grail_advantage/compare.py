"""``python -m grail_advantage.compare A... --against B...``: did it do anything? Runs of several seeds, paired by seed.

A run is a folder or a file of metrics: ``metrics.jsonl`` (this project's), verl's file logger, TRL's ``trainer_state.json``.
Imports no torch, so that it starts at once.
"""

from __future__ import annotations

import argparse
import html
import itertools
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grail_advantage.text_io import complain, numbered_lines, read_bytes, read_json, say

METRICS = (r"val-core/.+/acc/mean@\d+", "critic/score/mean", "eval_reward", "reward")
"""What is compared where no metric is named: the first of these patterns that all runs have."""
COUNTS = (3, 5, 10, 20, 40)
Figures = dict[str, dict[int, float]]


class Difference(NamedTuple):
    """A side's mean less the baseline's at a step, over paired seeds."""

    step: int
    means: tuple[float, float]
    value: float
    deviation: float  # of the pairs' differences; NaN for one pair
    half: float  # of the 95 % interval; NaN for one pair


def student_quantile(share: float, freedom: int) -> float:
    """Student's quantile for a share from 0.5, by bisection of the closed form (Abramowitz and Stegun 26.7.3, 26.7.4)."""

    def share_below(value: float) -> float:
        angle = math.atan(value / math.sqrt(freedom))
        odd = freedom % 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for power in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * power / (power + 1)
        within = math.sin(angle) * total
        return 0.5 + (angle + within) / math.pi if odd else 0.5 + within / 2

    low = 0.0
    high = 1e6
    # 1e6 halved 100 times is far below the last digit of any quantile.
    for _ in range(100):
        middle = (low + high) / 2
        if share_below(middle) < share:
            low = middle
        else:
            high = middle
    return high


def smallest_shown(deviation: float, seeds: int) -> float:
    """The difference that an interval of so many paired seeds excludes 0 for, about four times in five."""
    return (
        (student_quantile(0.975, seeds - 1) + student_quantile(0.8, seeds - 1))
        * deviation
        / math.sqrt(seeds)
    )


def read_run(path: Path) -> Figures:
    """A run's finite figures by name and step. ValueError: there are none; OSError of the disk."""
    # TRL keeps its log in each checkpoint; that of the newest is the longest.
    checkpoints = sorted(
        path.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime
    )
    files = [
        path,
        path / "metrics.jsonl",
        Path(f"{path}.jsonl"),
        path / "trainer_state.json",
        *checkpoints[::-1],
    ]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(
            f"{path} holds no metrics: neither metrics.jsonl, nor {path}.jsonl, nor trainer_state.json"
        )
    figures: Figures = {}
    try:
        if file.suffix == ".json":
            records = [
                (record["step"], record) for record in read_json(read_bytes(file))["log_history"]
            ]
        else:
            lines = [read_json(line) for _, line in numbered_lines(file)]
            records = [(line["step"], line["data"]) for line in lines]
        for step, data in records:
            for name, value in data.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    figures.setdefault(name, {})[int(step)] = float(value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no log of metrics: {error}") from None
    return figures


def read_side(runs: Sequence[str]) -> dict[int, tuple[str, Figures]]:
    """The runs by their seed: of ``SEED=PATH``, else the last ``seedN`` of the path. ValueError: it has none, or one twice."""
    side: dict[int, tuple[str, Figures]] = {}
    for run in runs:
        explicit = re.fullmatch(r"(\d+)=(.+)", run)
        path = Path(explicit[2] if explicit else run)
        of_path = re.findall(r"seed[_=-]?(\d+)", str(path.resolve()))
        if not explicit and not of_path:
            raise ValueError(f"{run}: which seed? Give SEED={run}, or a path that has seedN in it")
        seed = int(explicit[1] if explicit else of_path[-1])
        if seed in side:
            raise ValueError(
                f"seed {seed} twice on one side: {side[seed][0]} and {path}; give a run of each seed once"
            )
        side[seed] = (str(path), read_run(path))
    return side


def refuse_copies(runs: Sequence[tuple[str, Figures]]) -> None:
    """ValueError: two runs are one, as all figures but times are equal; a seed or a method did not arrive."""
    for (name, figures), (second_name, second_figures) in itertools.combinations(runs, 2):
        names = [
            key
            for key in figures.keys() | second_figures.keys()
            if not re.match("timing|perf|.*(runtime|per_second)", key)
        ]
        if names and all(figures.get(key) == second_figures.get(key) for key in names):
            raise ValueError(
                f"{name} and {second_name} have the same figures at every step: one run twice, or its seed did not arrive"
            )


def metric_of(runs: Sequence[tuple[str, Figures]]) -> str:
    """The first of :data:`METRICS` that all runs have."""
    names = set.intersection(*(set(figures) for _, figures in runs))
    for pattern in METRICS:
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                return name
    raise ValueError(
        f"name a --metric; all runs have {', '.join(sorted(names)[:40]) or 'none in common'}"
    )


def differences(
    side: Sequence[dict[int, float]], baseline: Sequence[dict[int, float]], steps: Sequence[int]
) -> list[Difference]:
    """The paired differences at each step, with Student's intervals."""
    rows = []
    for step in steps:
        values = [run[step] for run in side]
        baseline_values = [run[step] for run in baseline]
        pairs = [
            value - baseline_value
            for value, baseline_value in zip(values, baseline_values, strict=True)
        ]
        deviation = math.nan
        half = math.nan
        if len(pairs) > 1:
            deviation = statistics.stdev(pairs)
            half = student_quantile(0.975, len(pairs) - 1) * deviation / math.sqrt(len(pairs))
        means = (statistics.fmean(values), statistics.fmean(baseline_values))
        rows.append(Difference(step, means, statistics.fmean(pairs), deviation, half))
    return rows


def smoothed(points: dict[int, float], window: int) -> dict[int, float]:
    """At each step the mean of the last so many logged values."""
    values = list(points.values())
    means = {}
    for place, step in enumerate(points):
        first = max(0, place + 1 - window)
        means[step] = statistics.fmean(values[first : place + 1])
    return means


def verdict(rows: Sequence[Difference], seeds: Sequence[int]) -> list[str]:
    """What the last of the steps says, in words, and how many seeds what difference takes."""
    last = rows[-1]
    if len(seeds) == 1:
        return [
            "One seed each says nothing: two runs of one method differ, too, and by how much is not known here. Two "
            "seeds give an interval, five a useful one."
        ]
    excludes_zero = abs(last.value) > last.half
    outcome = "the interval excludes 0" if excludes_zero else "no difference is shown"
    lines = [f"Step {last.step}: {outcome}. Nothing is corrected for several looks."]
    if last.deviation > 0:
        needed = ", ".join(
            f"{count} seeds {smallest_shown(last.deviation, count):.3g}" for count in COUNTS
        )
        lines.append(
            f"At these pairs' deviation, {last.deviation:.3g}, a difference shows four times in five from: {needed}."
        )
    return lines


def table(rows: Sequence[Difference]) -> list[tuple[str, ...]]:
    """The cells of the table, its head first."""
    cells: list[tuple[str, ...]] = [("step", "A - B", "95 % interval", "A", "B")]
    for row in rows:
        interval = (
            ""
            if math.isnan(row.half)
            else f"[{row.value - row.half:.4g}, {row.value + row.half:.4g}]"
        )
        cells.append(
            (str(row.step), f"{row.value:+.4g}", interval, *(f"{mean:.4g}" for mean in row.means))
        )
    return cells


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Did it do anything?</title><style>:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:auto;padding:1em}p,h2{overflow-wrap:anywhere}
table{border-collapse:collapse;display:block;overflow-x:auto;white-space:nowrap;font-variant-numeric:tabular-nums}
td{padding:.2em .4em;text-align:right;border-bottom:1px solid gray}svg{width:100%;height:auto}</style>
<h1>Did it do anything?</h1>"""


def drawn(rows: Sequence[Difference]) -> str:
    """An SVG of the difference by step, its interval a band around it."""
    halves = [0 if math.isnan(row.half) else row.half for row in rows]
    # A difference of 0, or a single step, has no extent to divide by.
    top = max(abs(row.value) + half for row, half in zip(rows, halves, strict=True)) or 1
    width = (rows[-1].step - rows[0].step) or 1

    def points(sign: int) -> list[str]:
        ends = zip(rows, halves, strict=True)
        return [
            f"{(row.step - rows[0].step) / width * 600:.1f},{100 - (row.value + sign * half) / top * 90:.1f}"
            for row, half in ends
        ]

    return (
        f'<svg viewBox="0 0 600 200" role="img"><title>A - B by step, at most {top:.3g}</title>'
        f'<polygon points="{" ".join(points(1) + points(-1)[::-1])}" fill="#27c" opacity=".25"/>'
        f'<polyline points="{" ".join(points(0))}" fill="none" stroke="#27c" stroke-width="2"/>'
        f'<path d="M0 100H600" stroke="gray"/></svg><p>A - B, steps {rows[0].step} to {rows[-1].step}, with its 95 % '
        f"interval; the grey line is 0, the plot's edges {top / 0.9:.3g} above and below it.</p>"
    )


def compared(args: argparse.Namespace, against: Sequence[str]) -> tuple[list[str], str]:
    """The lines and the page's section of one comparison. ValueError as the parts say."""
    side = read_side(args.runs)
    baseline = read_side(against)
    seeds = sorted(side.keys() & baseline.keys())
    runs = [side[seed] for seed in seeds] + [baseline[seed] for seed in seeds]
    if not seeds:
        raise ValueError(f"no seed is on both sides: {sorted(side)} and {sorted(baseline)}")
    refuse_copies([*side.values(), *baseline.values()])
    lines = []
    sections = ""
    for metric in args.metric or [metric_of(runs)]:
        lacking = [name for name, figures in runs if metric not in figures]
        if lacking:
            raise ValueError(f"{', '.join(lacking)}: no figures of {metric}")
        # By step, not in the order of the log: smoothing takes the values before a step.
        curves = [
            smoothed(dict(sorted(figures[metric].items())), args.window) for _, figures in runs
        ]
        common = sorted(set.intersection(*(set(curve) for curve in curves)))
        # Of ten steps in common the third, fifth, eighth and tenth.
        steps = args.step
        if not steps and common:
            steps = sorted({common[math.ceil(len(common) * part / 4) - 1] for part in range(1, 5)})
        if not steps or set(steps) - set(common):
            raise ValueError(
                f"{metric}: not all runs have the steps {steps or ''}; all have {common[:40]}"
            )
        rows = differences(curves[: len(seeds)], curves[len(seeds) :], steps)
        title = f"{metric}, A - B, paired by seed: {', '.join(map(str, seeds))}"
        left_out = sorted(side.keys() ^ baseline.keys())
        words = verdict(rows, seeds)
        if left_out:
            words.append(
                f"Left out, as only one side has them: seeds {', '.join(map(str, left_out))}."
            )
        cells = table(rows)
        names = f"A: {' '.join(args.runs)}; B: {' '.join(against)}"
        lines += [
            names,
            title,
            *("  ".join(f"{cell:>18}" for cell in row) for row in cells),
            *words,
            "",
        ]
        all_rows = differences(curves[: len(seeds)], curves[len(seeds) :], common)
        body = "".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells
        )
        paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in [names, *words])
        sections += (
            f"<h2>{html.escape(title)}</h2>{paragraphs}<table>{body}</table>{drawn(all_rows)}"
        )
    return lines, sections


def main(argv: list[str] | None = None) -> int:
    """Print the comparisons, write the page; 1 with a message for runs that cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.compare", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="A",
        help="folders or files of metrics; the seed is SEED=PATH or seedN in the path",
    )
    add(
        "--against",
        nargs="+",
        action="append",
        required=True,
        metavar="B",
        help="baseline runs; may be repeated",
    )
    add("--metric", action="append", help="default: held-out accuracy, else the training reward")
    add("--step", type=int, nargs="+", help="default: four of those that all runs have")
    add(
        "--window",
        type=int,
        default=1,
        help="compare means of so many logged values up to a step; default: %(default)s",
    )
    add("--page", type=Path, help="also write an HTML file")
    args = parser.parse_args(argv)
    page = ""
    try:
        for against in args.against:
            lines, sections = compared(args, against)
            say(*lines)
            page += sections
        if args.page:
            args.page.write_text(f"{HEAD}{page}</html>")
    except (ValueError, OSError) as error:
        complain("compare", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
