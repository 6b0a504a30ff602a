"""Part b: TRL alone. The tiny model that the repository ships, trained with GRAIL and with ``uniform``."""

from __future__ import annotations

import sys

from gpu_check.outcome import Outcome
from gpu_check.runs import DRY_STEPS, EVERY, METHODS, RUNS, STEPS, judge, train


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with fewer and smaller steps.
    """
    folder = RUNS / "trl"
    steps, options = (STEPS, []) if device == "cuda" else (DRY_STEPS, ["--prompts", "4"])
    for method in METHODS:
        with outcome.attempt(f"{method} in TRL"):
            command = [sys.executable, "examples/trl_grail.py", "--method", method, "--output-dir", str(folder)]
            command += ["--steps", str(steps), "--eval-every", str(EVERY), *options]
            run_dir = folder / "seed0" / f"{method}_trl"
            judge(outcome, method, method, train(outcome, method, command, run_dir, steps))
