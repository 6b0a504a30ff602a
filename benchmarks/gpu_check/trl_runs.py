"""Part b: TRL alone. The shipped tiny model with GRAIL and with ``uniform``, on problems that lie beside this file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.gpu_check.outcome import Outcome
from recipe import run_report
from verl_cpu.tiny.shipped import load_shipped

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "outputs" / "gpu_check_runs"
"""Models, problems, dumps and logs of the runs."""
PROBLEMS = Path(__file__).parent
METHODS = ("grail", "uniform")
Logged = dict[int, dict[str, float]]


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part; on the CPU fewer and smaller steps."""
    folder, dry = RUNS / "b", device == "cpu"
    for part in load_shipped():
        part.save_pretrained(folder / "model")
    files = {"data": PROBLEMS / "train.jsonl", "held-out": folder / "held_out.jsonl"}
    held_out = (PROBLEMS / "validation.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files["held-out"].write_text("".join(held_out[: 8 if dry else None]), encoding="utf-8")
    sizes = {"prompts": 4 if dry else 32, "micro-batch": 32 if dry else 128, "max-response": 64, "learning-rate": 1e-4}
    train_both(outcome, folder, files, {**sizes, "eval-every": 1 if dry else 5}, steps=2 if dry else 20)


def train_both(
    outcome: Outcome,
    folder: Path,
    files: Mapping[str, Path],
    sizes: Mapping[str, float],
    steps: int,
    *,
    some_right: bool = True,
) -> None:
    """Train ``folder/model`` with each method by ``examples/trl_grail.py``: curves as they go, what must hold, and the price.

    ``files`` has problems to train on (``data``) and held-out ones (``held-out``); ``sizes`` has further options of it.
    """
    price: dict[str, dict[str, float]] = {}
    for method in METHODS:
        with outcome.attempt(f"{method} in TRL"):
            run_dir = folder / method
            options = {**files, **sizes, "lora-rank": 0, "steps": steps, "method": method, "output": run_dir}
            logged = train(outcome, method, options | {"model": folder / "model"}, run_dir)
            judge(outcome, method, logged, steps, some_right)
            after_first = [data for step, data in sorted(logged.items()) if step > 1 and "step_time" in data]
            price[method] = {
                "seconds a step": median(data["step_time"] for data in after_first),
                "of them for the weights": median(data[f"{method}/seconds"] for data in after_first),
            }
            outcome.figures("Price", price, "Medians, without the first step.")


def train(outcome: Outcome, name: str, options: Mapping[str, object], run_dir: Path) -> Logged:
    """Run the example with a GPU's precision, and return its metrics by step; ``outcome`` gets :func:`curve` every second."""
    (run_dir / run_report.METRICS_FILE).unlink(missing_ok=True)
    command = [sys.executable, "examples/trl_grail.py", "--bf16"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    # TRL is in a folder of its own beside verl.
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), f"{sys.prefix}/trl"])}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}) as process:
        while process.poll() is None:
            time.sleep(1)
            outcome.figures(f"Run of {name}, by step", curve(by_step(run_dir)))
    logged = by_step(run_dir)
    outcome.figures(f"Run of {name}, by step", curve(logged))
    outcome.check(f"{name}: the run ends well", process.returncode == 0, f"exit status {process.returncode}")
    return logged


def by_step(run_dir: Path) -> Logged:
    """All that a run has logged."""
    steps: Logged = {}
    for line in run_report.read_lines(run_dir):
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record["data"])
    return steps


def curve(logged: Logged) -> dict[str, dict[str, float]]:
    """By step: held-out accuracy, mean reward of the responses, seconds; what a step lacks is left out."""
    names = {"eval_reward": "held-out accuracy", "reward": "mean reward", "step_time": "seconds"}
    return {
        str(step): {label: round(data[name], 4) for name, label in names.items() if name in data}
        for step, data in logged.items()
    }


def judge(outcome: Outcome, method: str, logged: Logged, steps: int, some_right: bool) -> None:
    """What must hold of every run: it makes its steps, every reward is a number, and GRAIL scores responses."""
    rewards = [data["reward"] for data in logged.values() if "reward" in data]
    made = len(rewards) == steps and all(map(math.isfinite, rewards))
    between = f"{min(rewards, default=math.nan):.3f} to {max(rewards, default=math.nan):.3f}"
    outcome.check(f"{method}: every step has a reward", made, f"{len(rewards)} of {steps} steps, {between}")
    if some_right:
        outcome.check(
            f"{method}: some are correct and some incorrect", any(0 < reward < 1 for reward in rewards), between
        )
    if some_right and method != "uniform":
        rates = [data[f"{method}/selected_rate"] for data in logged.values() if f"{method}/selected_rate" in data]
        outcome.check(f"{method} scores responses", any(rates), f"{max(rates, default=0):.0%} of a batch at most")
