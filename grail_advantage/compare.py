"""``python -m grail_advantage.compare A... --against B...``: did it do anything? Runs of several seeds, paired by seed.

A run is a folder or a file of metrics: ``metrics.jsonl`` (this project's), verl's file logger, TRL's ``trainer_state.json``.
Imports no torch, so that it starts at once.
"""

import argparse
import html
import itertools
import math
import operator
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from grail_advantage.text_io import complain, numbered_lines, read_bytes, read_json, say

METRICS = (r"val-core/.+/acc/mean@\d+", "critic/score/mean", "eval_reward", "reward")
"""What is compared where no metric is named: the first of these patterns that all runs have."""
COUNTS = (3, 5, 10, 20, 40)
Curve = dict[int, float]
"""A metric by its step."""
Figures = dict[str, Curve]


class Difference(NamedTuple):
    """A side's mean less the baseline's at a step, over paired seeds."""

    step: int
    value: float
    half: float  # of the 95 % interval; NaN for one pair
    deviation: float  # of the pairs' differences; NaN for one pair
    mean: float
    baseline_mean: float


def student_quantile(share: float, freedom: int) -> float:
    """Student's quantile for a share from 0.5, among billionths, by the closed form (Abramowitz and Stegun 26.7.3,
    26.7.4)."""

    def share_below(billionths: int) -> float:
        angle = math.atan(billionths / 1e9 / math.sqrt(freedom))
        odd = freedom % 2
        term = math.cos(angle) ** odd
        total = 0.0
        for power in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * power / (power + 1)
        within = math.sin(angle) * total
        if odd:
            within = (angle + within) * 2 / math.pi
        return 0.5 + within / 2

    # The largest that is asked for, 12.7 for 0.975 and two pairs, is far below 1e6.
    return bisect_left(range(10**15), share, key=share_below) / 1e9


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
    checkpoints = path.glob("checkpoint-*/trainer_state.json")
    files = [
        path,
        path / "metrics.jsonl",
        Path(f"{path}.jsonl"),
        path / "trainer_state.json",
        *sorted(checkpoints, key=os.path.getmtime, reverse=True),
    ]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise ValueError(
            f"{path} holds no metrics: neither metrics.jsonl, nor {path}.jsonl, nor trainer_state.json"
        )
    figures: Figures = {}
    try:
        if file.suffix == ".json":
            records = read_json(read_bytes(file))["log_history"]
        else:
            records = [read_json(line) for _, line in numbered_lines(file)]
        for record in records:
            # TRL's figures are beside the step, the others' below it.
            for name, value in record.get("data", record).items():
                if isinstance(value, int | float) and math.isfinite(value):
                    figures.setdefault(name, {})[int(record["step"])] = float(value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no log of metrics: {error}") from None
    return figures


def read_side(runs: Sequence[str]) -> dict[int, tuple[str, Figures]]:
    """The runs by their seed: of ``SEED=PATH``, else the last ``seedN`` of the path. ValueError: it has none, or one twice."""
    side: dict[int, tuple[str, Figures]] = {}
    for run in runs:
        explicit = re.fullmatch(r"(\d+)=(.+)", run)
        path = Path(explicit[2] if explicit else run)
        seeds = re.findall(r"seed[_=-]?(\d+)", str(path.resolve()))
        if explicit:
            seeds = [explicit[1]]
        if not seeds:
            raise ValueError(f"{run}: which seed? Give SEED={run}, or a path that has seedN in it")
        seed = int(seeds[-1])
        if seed in side:
            raise ValueError(
                f"seed {seed} twice on one side: {side[seed][0]} and {path}; give a run of each seed once"
            )
        side[seed] = (str(path), read_run(path))
    return side


def refuse_copies(runs: Sequence[tuple[str, Figures]]) -> None:
    """ValueError: two runs are one, as all figures but times are equal; a seed or a method did not arrive."""

    def results(figures: Figures) -> Figures:
        times = re.compile("timing|perf|.*(runtime|per_second)")
        return {name: curve for name, curve in figures.items() if not times.match(name)}

    for (name, figures), (second_name, second_figures) in itertools.combinations(runs, 2):
        # Runs of times alone are not told apart.
        if results(figures) and results(figures) == results(second_figures):
            raise ValueError(
                f"{name} and {second_name} have the same figures at every step: one run twice, or its seed did not arrive"
            )


def metric_of(runs: Sequence[tuple[str, Figures]]) -> str:
    """The first of :data:`METRICS` that all runs have."""
    names = sorted(set.intersection(*(set(figures) for _, figures in runs)))
    for pattern in METRICS:
        for name in names:
            if re.fullmatch(pattern, name):
                return name
    raise ValueError(f"name a --metric; all runs have {', '.join(names[:40]) or 'none in common'}")


def differences(
    side: Sequence[Curve], baseline: Sequence[Curve], steps: Sequence[int]
) -> list[Difference]:
    """The paired differences at each step, with Student's intervals."""
    rows = []
    for step in steps:
        values = [run[step] for run in side]
        baseline_values = [run[step] for run in baseline]
        pairs = list(map(operator.sub, values, baseline_values))
        deviation = math.nan
        half = math.nan
        if len(pairs) > 1:
            deviation = stdev(pairs)
            half = student_quantile(0.975, len(pairs) - 1) * deviation / math.sqrt(len(pairs))
        rows.append(
            Difference(step, fmean(pairs), half, deviation, fmean(values), fmean(baseline_values))
        )
    return rows


def smoothed(curve: Curve, window: int) -> Curve:
    """At each step the mean of the last so many logged values."""
    # By step, not in the order of the log.
    steps = sorted(curve)
    means = {}
    for index, step in enumerate(steps):
        first = max(0, index + 1 - window)
        means[step] = fmean(curve[step] for step in steps[first : index + 1])
    return means


def verdict(last: Difference, seeds: int) -> list[str]:
    """What the last of the steps says, in words, and how many seeds what difference takes."""
    if seeds == 1:
        return [
            "One seed each says nothing: two runs of one method differ, too, and by how much is not known here. Two "
            "seeds give an interval, five a useful one."
        ]
    outcome = "no difference is shown"
    if abs(last.value) > last.half:
        outcome = "the interval excludes 0"
    lines = [f"Step {last.step}: {outcome}. Nothing is corrected for several looks."]
    if last.deviation > 0:
        needed = ", ".join(
            f"{count} seeds {smallest_shown(last.deviation, count):.3g}" for count in COUNTS
        )
        lines.append(
            f"At these pairs' deviation, {last.deviation:.3g}, a difference shows four times in five from: {needed}."
        )
    return lines


def table(rows: Sequence[Difference]) -> list[list[str]]:
    """The cells of the table, its head first."""
    cells = [["step", "A - B", "95 % interval", "A", "B"]]
    for row in rows:
        interval = ""
        if not math.isnan(row.half):
            interval = f"[{row.value - row.half:.4g}, {row.value + row.half:.4g}]"
        means = [f"{row.mean:.4g}", f"{row.baseline_mean:.4g}"]
        cells.append([str(row.step), f"{row.value:+.4g}", interval, *means])
    return cells


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Did it do anything?</title><style>:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:auto;padding:1em}p,h2{overflow-wrap:anywhere}
table{border-collapse:collapse;display:block;overflow-x:auto;white-space:nowrap;font-variant-numeric:tabular-nums}
td{padding:.2em .4em;text-align:right;border-bottom:1px solid gray}svg{width:100%;height:14em}</style>
<h1>Did it do anything?</h1>"""


def drawn(rows: Sequence[Difference]) -> str:
    """An SVG of the difference by step, its interval a band around it."""

    # One pair has no interval.
    halves = [0 if math.isnan(row.half) else row.half for row in rows]
    pairs = list(zip(rows, halves, strict=True))

    def line(sign: int) -> list[str]:
        # An SVG's y grows downwards.
        return [f"{row.step},{-row.value - sign * half}" for row, half in pairs]

    first = rows[0].step
    last = rows[-1].step
    # A difference of 0, or a single step, has no extent.
    top = max(abs(row.value) + half for row, half in pairs) or 1
    edge = top / 0.9
    box = f"{first} {-edge} {last - first or 1} {2 * edge}"
    thin = 'vector-effect="non-scaling-stroke"'
    return (
        f'<svg viewBox="{box}" preserveAspectRatio="none" role="img">'
        f"<title>A - B by step, at most {top:.3g}</title>"
        f'<polygon points="{" ".join(line(1) + line(-1)[::-1])}" fill="#27c" opacity=".25"/>'
        f'<polyline points="{" ".join(line(0))}" fill="none" stroke="#27c" stroke-width="2" {thin}/>'
        f'<path d="M{first} 0H{last}" stroke="gray" {thin}/></svg><p>A - B, steps {first} to {last}, with its 95 % '
        f"interval; the grey line is 0, the plot's edges {edge:.3g} above and below it.</p>"
    )


def compared(args: argparse.Namespace, against: Sequence[str]) -> tuple[list[str], str]:
    """The lines and the page's section of one comparison. ValueError as the parts say."""
    side = read_side(args.runs)
    baseline = read_side(against)
    seeds = sorted(side.keys() & baseline.keys())
    if not seeds:
        raise ValueError(f"no seed is on both sides: {sorted(side)} and {sorted(baseline)}")
    refuse_copies([*side.values(), *baseline.values()])
    runs = [part[seed] for part in (side, baseline) for seed in seeds]
    names = f"A: {' '.join(args.runs)}; B: {' '.join(against)}"
    lines = []
    sections = ""
    for metric in args.metric or [metric_of(runs)]:
        lacking = [name for name, figures in runs if metric not in figures]
        if lacking:
            raise ValueError(f"{', '.join(lacking)}: no figures of {metric}")
        curves = [smoothed(figures[metric], args.window) for _, figures in runs]
        common = sorted(set.intersection(*map(set, curves)))
        steps = args.step
        if not steps and common:
            # Of ten steps in common the third, fifth, eighth and tenth.
            steps = sorted({common[math.ceil(len(common) * part / 4) - 1] for part in range(1, 5)})
        if not steps or set(steps) - set(common):
            raise ValueError(
                f"{metric}: not all runs have the steps {steps or ''}; all have {common[:40]}"
            )
        sides = (curves[: len(seeds)], curves[len(seeds) :])
        rows = differences(*sides, steps)
        title = f"{metric}, A - B, paired by seed: {', '.join(map(str, seeds))}"
        words = verdict(rows[-1], len(seeds))
        left_out = sorted(side.keys() ^ baseline.keys())
        if left_out:
            words.append(
                f"Left out, as only one side has them: seeds {', '.join(map(str, left_out))}."
            )
        lines += [names, title]
        body = ""
        for cells in table(rows):
            lines.append("  ".join(f"{cell:>18}" for cell in cells))
            body += f"<tr><td>{'</td><td>'.join(cells)}</td></tr>"
        lines += [*words, ""]
        paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in [names, *words])
        picture = drawn(differences(*sides, common))
        sections += f"<h2>{html.escape(title)}</h2>{paragraphs}<table>{body}</table>{picture}"
    return lines, sections


def main(argv: list[str] | None = None) -> int:
    """Print the comparisons, write the page; 1 with a message for runs that cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.compare", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    seed = "folders or files of metrics; the seed is SEED=PATH or seedN in the path"
    add("runs", nargs="+", metavar="A", help=seed)
    again = "baseline runs; may be repeated"
    add("--against", nargs="+", action="append", required=True, metavar="B", help=again)
    add("--metric", action="append", help="default: held-out accuracy, else the training reward")
    add("--step", type=int, nargs="+", help="default: four of those that all runs have")
    means = "compare means of so many logged values up to a step; default: %(default)s"
    add("--window", type=int, default=1, help=means)
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
