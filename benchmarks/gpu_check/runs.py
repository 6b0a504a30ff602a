"""Training runs of the parts: started as processes, with what they have logged so far among the part's figures."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.outcome import Outcome
from gpu_check.parts import ROOT, last_line, run_command
from recipe import run_report

RUNS = ROOT / "outputs" / "gpu_check" / "runs"
"""Models, data and logs of the runs."""
STEPS, EVERY = 20, 5
"""Steps of a run with the tiny model, and steps between two evaluations on held-out problems."""
DRY_STEPS = 2
METHODS = ("grail", "uniform")


def environment(**variables: str) -> dict[str, str]:
    """Variables of a run: no hub, this project, and the given ones."""
    offline = {"HF_HUB_OFFLINE": "1", "PYTHON": sys.executable, "RAY_USAGE_STATS_ENABLED": "0", "DRY_RUN": "0"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **offline, "PYTHONPATH": path, **variables}


def train(
    outcome: Outcome, name: str, command: Sequence[str], run_dir: Path, steps: int, **variables: str
) -> dict[int, dict[str, float]]:
    """Run a training, check that it made all steps, and return its metrics by step.

    Args:
        outcome: gets :func:`curve` after every step, as ``curve, NAME``.
        name: of the run.
        command: starts it.
        run_dir: where its ``metrics.jsonl`` will be.
        steps: that it should make.
        variables: of its environment.
    """
    path, size = run_dir / run_report.METRICS_FILE, 0
    path.unlink(missing_ok=True)

    def keep() -> None:
        nonlocal size
        if path.exists() and path.stat().st_size != size:
            size = path.stat().st_size
            outcome.figures(f"curve, {name}", curve(by_step(run_dir)))

    code, output = run_command(list(command), environment=environment(**variables), each_line=keep)
    keep()
    logged = by_step(run_dir)
    made = [step for step, figures in curve(logged).items() if "reward" in figures]
    outcome.check(
        f"{name}: the run makes its steps",
        code == 0 and len(made) == steps,
        f"{len(made)} of {steps}" + ("" if code == 0 else f", exit status {code}: {last_line(output)}"),
    )
    return logged


def by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """All that a run has logged."""
    steps: dict[int, dict[str, float]] = {}
    for line in run_report.read_lines(run_dir):
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record["data"])
    return steps


def curve(logged: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By step: held-out accuracy, mean reward of the responses, seconds; what a step lacks is left out."""
    steps = {}
    for number, data in logged.items():
        step = run_report.Step.parse(json.dumps({"step": number, "data": dict(data)}))
        values = {"accuracy": step.accuracy, "reward": step.reward, "seconds": step.seconds}
        steps[str(number)] = {name: round(value, 4) for name, value in values.items() if value is not None}
    return steps


def judge(outcome: Outcome, name: str, method: str, logged: Mapping[int, Mapping[str, float]]) -> None:
    """What must hold of every run: GRAIL scores rows, and every reward is a number."""
    rewards = [figures["reward"] for figures in curve(logged).values() if "reward" in figures]
    outcome.check(
        f"{name}: rewards are numbers, some right and some wrong",
        bool(rewards) and all(map(math.isfinite, rewards)) and any(0 < reward < 1 for reward in rewards),
        f"{min(rewards, default=math.nan):.3f} to {max(rewards, default=math.nan):.3f}",
    )
    if method != "uniform":
        rates = [data[f"{method}/selected_rate"] for data in logged.values() if f"{method}/selected_rate" in data]
        outcome.check(f"{name}: {method} scores rows", any(rates), f"{max(rates, default=0):.0%} of a batch at most")


def logged_figures(outcome: Outcome, name: str, data: Mapping[str, Any], shown: Sequence[str]) -> None:
    """Metrics of one step, where they were logged."""
    outcome.figures(f"step, {name}", {key: round(data[key], 4) for key in shown if key in data})
