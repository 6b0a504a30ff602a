"""Watch a run while it trains, and report on it when it has ended.

Reads the file that verl's ``file`` logger writes (``VERL_FILE_LOGGER_PATH``), so it needs neither Ray nor verl:

    python3 -m recipe.run_report watch RUN_DIR --pid PID     one line a step until the process ends
    python3 -m recipe.run_report summary RUN_DIR             a short table
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
_ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")


@dataclass(frozen=True)
class LoggedStep:
    """A training step in one line of the metrics file, by verl's names or TRL's; figures that the line lacks are ``None``."""

    number: int
    accuracy: float | None
    """Held-out accuracy, when the step validated."""
    reward: float | None
    """Mean training reward of the step's responses."""
    seconds: float | None
    selected: float | None
    """Share of responses that got token scores from a pass of their own estimator."""

    @classmethod
    def parse(cls, line: str) -> LoggedStep:
        record: dict[str, Any] = json.loads(line)
        data = record["data"]
        accuracies = [value for name, value in data.items() if _ACCURACY.fullmatch(name) or name == "eval_reward"]
        selected = [value for name, value in data.items() if name.endswith("/selected_rate")]
        return cls(
            number=record["step"],
            accuracy=statistics.fmean(accuracies) if accuracies else None,
            reward=data.get("critic/score/mean", data.get("reward")),
            seconds=data.get("timing_s/step", data.get("step_time")),
            selected=selected[0] if selected else None,
        )


def read_lines(run_dir: Path) -> list[str]:
    """The lines logged so far; one that is still being written is left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_steps(run_dir: Path) -> list[LoggedStep]:
    """All steps logged so far, in order."""
    return [LoggedStep.parse(line) for line in read_lines(run_dir)]


def _is_running(pid: int) -> bool:
    """Whether a process lives; one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _new_steps(run_dir: Path, pid: int) -> Iterator[LoggedStep | None]:
    """Steps as they are logged; ``None`` whenever nothing new came for a second.

    Lines from before the run resumed are not new. A run that resumes from an earlier step removes the later ones from the
    file before it logs again.
    """
    seen = read_lines(run_dir)
    while True:
        running = _is_running(pid)
        lines = read_lines(run_dir)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(seen, lines, strict=False)))
        yield from map(LoggedStep.parse, lines[common:])
        seen = lines
        if not running:
            return
        yield None
        time.sleep(1)


def watch(run_dir: Path, pid: int, total: int) -> None:
    """Print a line for each step until the process ends."""
    started = time.monotonic()
    first_step_at: float | None = None
    first = 0
    reported_at = started
    started_in = 0.0
    before = read_steps(run_dir)
    if before:
        print(f"  {before[-1].number} steps are logged already", flush=True)
    for step in _new_steps(run_dir, pid):
        now = time.monotonic()
        if step is not None and not started_in:
            started_in = now - started
            print(f"  Ray, vLLM and the trainer started in {started_in:.0f} s", flush=True)
        if step is None:
            if not started_in and now - reported_at >= 15:
                reported_at = now
                print(f"  starting Ray, vLLM and the trainer: {now - started:.0f} s", flush=True)
            continue
        parts = [f"step {step.number:>4}/{total}"]
        if step.reward is not None:
            parts.append(f"reward {step.reward:.3f}")
        if step.selected is not None:
            parts.append(f"token scores for {step.selected:4.0%} of responses")
        if step.accuracy is not None:
            parts.append(f"held-out accuracy {step.accuracy:.3f}")
        if step.number > 0:
            if first_step_at is None:
                first_step_at, first = now - (step.seconds or 0), step.number
            pace = (now - first_step_at) / (step.number - first + 1)
            parts.append(f"{pace:.1f} s/step, {pace * (total - step.number):.0f} s left")
        print("  " + "  ".join(parts), flush=True)


def summary(run_dir: Path, title: str) -> str:
    """The table that ends a run.

    Raises:
        ValueError: the run logged nothing.
    """
    steps = read_steps(run_dir)
    if not steps:
        raise ValueError(f"{run_dir / METRICS_FILE} holds no steps; see {run_dir / 'train.log'} for the cause")
    validated = [step for step in steps if step.accuracy is not None]
    trained = [step for step in steps if step.reward is not None]
    rows: list[tuple[str, str]] = [("training steps", str(len(trained)))]
    if validated:
        before, after = validated[0], validated[-1]
        rows += [
            (f"held-out accuracy at step {before.number}", f"{before.accuracy:.3f}"),
            (f"held-out accuracy at step {after.number}", f"{after.accuracy:.3f}"),
            ("change, points", f"{100 * (after.accuracy - before.accuracy):+.1f}"),
        ]
    if trained:
        tail = trained[-10:]
        rows += [
            ("reward, first step", f"{trained[0].reward:.3f}"),
            (f"reward, mean of the last {len(tail)} steps", f"{statistics.fmean(step.reward for step in tail):.3f}"),
            ("seconds a step, median", f"{statistics.median(step.seconds for step in trained):.1f}"),
        ]
        selected = [step.selected for step in trained if step.selected is not None]
        if selected:
            rows.append(("responses with token scores, mean", f"{statistics.fmean(selected):.1%}"))
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {value:>8}" for name, value in rows)
    curves, run = shlex.quote(str(run_dir / "tensorboard")), shlex.quote(str(run_dir))
    return f"{title}\n{table}\n  tensorboard --logdir {curves}\n  python -m grail_advantage.report {run}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    watch_parser = commands.add_parser("watch", help="print a line a step until the process ends")
    watch_parser.add_argument("run_dir", type=Path)
    watch_parser.add_argument("--pid", type=int, required=True)
    watch_parser.add_argument("--total-steps", type=int, required=True)
    summary_parser = commands.add_parser("summary", help="print the table")
    summary_parser.add_argument("run_dir", type=Path)
    summary_parser.add_argument("--title", default="Run")
    arguments = parser.parse_args()
    if arguments.command == "watch":
        watch(arguments.run_dir, arguments.pid, arguments.total_steps)
        return
    try:
        print(summary(arguments.run_dir, arguments.title))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
