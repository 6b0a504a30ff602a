"""Part b: TRL alone. The tiny model that the repository ships, trained with GRAIL and with ``uniform``.

Its problems lie beside this file, so that no machine has to make them; ``python -m benchmarks.gpu_check.trl_runs`` writes them
anew.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_check.outcome import Outcome
from benchmarks.gpu_check.parts import ROOT
from recipe import run_report
from recipe.tiny.shipped import load_shipped
from recipe.tiny.task import Split, problems

RUNS = ROOT / "outputs" / "gpu_check_runs"
"""Model, dumps and logs of the runs."""
PROBLEMS: dict[Split, int] = {"train": 640, "validation": 128}
STEPS, DRY_STEPS = 20, 2
METHODS = ("grail", "uniform")
Logged = dict[int, dict[str, float]]


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with fewer and smaller steps.
    """
    model, tokenizer = load_shipped()
    for part in (model, tokenizer):
        part.save_pretrained(RUNS / "model")
    steps, prompts, asked = (STEPS, 32, PROBLEMS["validation"]) if device == "cuda" else (DRY_STEPS, 4, 8)
    held_out = RUNS / "held_out.jsonl"
    held_out.write_text("".join(problem_file("validation").read_text(encoding="utf-8").splitlines(True)[:asked]))
    sizes = {"prompts": prompts, "micro-batch": min(128, prompts * 8), "max-response": 64, "lora-rank": 0}
    sizes |= {"learning-rate": 1e-4, "steps": steps, "eval-every": 5 if device == "cuda" else 1}
    for method in METHODS:
        with outcome.attempt(f"{method} in TRL"):
            run_dir = RUNS / method
            command = [sys.executable, "examples/trl_grail.py", "--method", method, "--output", str(run_dir)]
            command += ["--model", str(RUNS / "model"), "--data", str(problem_file("train"))]
            command += ["--held-out", str(held_out)]
            command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
            judge(outcome, method, train(outcome, method, command, run_dir, steps))


def train(outcome: Outcome, name: str, command: list[str], run_dir: Path, steps: int) -> Logged:
    """Run a training, check that it made all steps, and return its metrics by step.

    Args:
        outcome: gets :func:`curve` after every step.
        name: of the run.
        command: starts it.
        run_dir: where its ``metrics.jsonl`` will be.
        steps: that it should make.
    """
    (run_dir / run_report.METRICS_FILE).unlink(missing_ok=True)
    # TRL is in a folder of its own beside verl.
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), f"{sys.prefix}/trl"])}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}) as process:
        while process.poll() is None:
            time.sleep(1)
            outcome.figures(f"Run of {name}, by step", curve(by_step(run_dir)))
    outcome.figures(f"Run of {name}, by step", curve(by_step(run_dir)))
    logged = by_step(run_dir)
    made = [step for step, figures in curve(logged).items() if "mean reward" in figures]
    outcome.check(
        f"{name}: the run makes its steps",
        process.returncode == 0 and len(made) == steps,
        f"{len(made)} of {steps}, exit status {process.returncode}",
    )
    return logged


def by_step(run_dir: Path) -> Logged:
    """All that a run has logged."""
    steps: Logged = {}
    for line in run_report.read_lines(run_dir):
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record["data"])
    return steps


def curve(logged: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By step: held-out accuracy, mean reward of the responses, seconds; what a step lacks is left out."""
    steps = {}
    for number, data in logged.items():
        step = run_report.Step.parse(json.dumps({"step": number, "data": dict(data)}))
        values = {"held-out accuracy": step.accuracy, "mean reward": step.reward, "seconds": step.seconds}
        steps[str(number)] = {name: round(value, 4) for name, value in values.items() if value is not None}
    return steps


def judge(outcome: Outcome, method: str, logged: Logged) -> None:
    """What must hold of every run: GRAIL scores rows, and every reward is a number."""
    rewards = [figures["mean reward"] for figures in curve(logged).values() if "mean reward" in figures]
    outcome.check(
        f"{method}: rewards are numbers, some right and some wrong",
        bool(rewards) and all(map(math.isfinite, rewards)) and any(0 < reward < 1 for reward in rewards),
        f"{min(rewards, default=math.nan):.3f} to {max(rewards, default=math.nan):.3f}",
    )
    if method != "uniform":
        rates = [data[f"{method}/selected_rate"] for data in logged.values() if f"{method}/selected_rate" in data]
        outcome.check(f"{method} scores rows", any(rates), f"{max(rates, default=0):.0%} of a batch at most")


def problem_file(split: Split) -> Path:
    """Where the problems of a split lie."""
    return Path(__file__).parent / f"{split}.jsonl"


def problem_lines(split: Split) -> str:
    """The problems as ``examples/trl_grail.py`` reads them; makes them with reasoning-gym."""
    rows = (
        {"prompt": [{"role": "user", "content": problem.text}], "answer": str(problem.answer)}
        for problem in problems(split, PROBLEMS[split], seed=0)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


if __name__ == "__main__":
    for split in PROBLEMS:
        problem_file(split).write_text(problem_lines(split), encoding="utf-8")
