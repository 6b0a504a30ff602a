"""A run in the terminal: a line for each step while it trains, and a table at its end. Nothing but the curves is read.

python -m grail_advantage.report RUN --summary [--follow PID]
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median

from grail_advantage.receipt.foreign import visible
from grail_advantage.view.page.data import CURVES, read_metrics

SECONDS = "timing_s/step|step_time"
LATEST = 10
"""Steps of the last mean."""


def summary(run: Path) -> list[str]:
    """Lines with the first and last value of each metric that the report's page draws, and the mean of the last :data:`LATEST`.

    Raises:
        ValueError: the run has logged no step.
    """
    metrics, problems = read_metrics(run)
    if not metrics:
        raise ValueError("; ".join([f"{run} has no step yet; the run's own output says why", *problems]))
    seconds = [value for values in metrics.values() for value in _matching(values, SECONDS).values()]
    lines = [f"{run}: {len(seconds)} training steps" + (f", {median(seconds):.1f} s each (median)" if seconds else "")]
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    rows: list[tuple[str, ...]] = [("", "steps", "first", "last", f"mean of {LATEST}")]
    for _, _, patterns in CURVES:
        for pattern in patterns:
            for name in filter(re.compile(pattern).fullmatch, names):
                of_steps = {step: values[name] for step, values in metrics.items() if name in values}
                found = list(of_steps.values())
                figures = [f"{value:.3f}" for value in (found[0], found[-1], fmean(found[-LATEST:]))]
                rows.append((visible(name, breaks=False), f"{min(of_steps)} to {max(of_steps)}", *figures))
    width = max(len(row[0]) for row in rows)
    lines += [f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for name, *cells in rows]
    return [*lines, *problems]


def follow(folder: Path, pid: int) -> Iterator[str]:
    """A line for each step that a run logs until its process ends. Steps from before are left out; those that a resumed run
    makes again are not."""
    shown = step_lines(folder)
    running = True
    while running:
        running = _is_running(pid)  # before the file is read, so that no line is missed
        lines = step_lines(folder)
        yield from (line for step, line in lines.items() if shown.get(step) != line)
        shown |= lines
        time.sleep(1 if running else 0)


def step_lines(folder: Path) -> dict[int, str]:
    """Reward, held-out ``acc`` or reward, and seconds of each step."""
    shown = {
        "reward": "critic/score/mean|reward",
        "held-out acc": r"val-core/.+/acc/mean@\d+",
        "held-out reward": "eval_reward",
    }
    lines = {}
    for step, values in read_metrics(folder)[0].items():
        found = [(words, fmean(_matching(values, pattern).values() or [math.nan])) for words, pattern in shown.items()]
        parts = [f"{words} {value:.3f}" for words, value in found if not math.isnan(value)]
        parts += [f"{value:.1f} s" for value in _matching(values, SECONDS).values()]
        lines[step] = f"step {step:>4}  {'  '.join(parts)}"
    return lines


def _matching(values: Mapping[str, float], pattern: str) -> dict[str, float]:
    return {name: value for name, value in values.items() if re.fullmatch(pattern, name)}


def _is_running(pid: int) -> bool:
    """Whether a process lives; one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
