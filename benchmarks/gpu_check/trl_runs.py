"""Part b: TRL alone. The tiny model that the repository ships, trained with GRAIL and with ``uniform``."""

from __future__ import annotations

import os
import sys

from gpu_check.outcome import Outcome
from gpu_check.runs import DRY_STEPS, EVERY, METHODS, RUNS, STEPS, environment, judge, train
from recipe.tiny.prepare import MODEL_FOLDER, default_settings, prepare


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with fewer and smaller steps.
    """
    data = RUNS / "trl" / "data"
    prepare(data, default_settings("tiny", 0))
    steps, prompts = (STEPS, 32) if device == "cuda" else (DRY_STEPS, 4)
    sizes = {"prompts": prompts, "micro-batch": min(128, prompts * 8), "max-response": 64, "lora-rank": 0}
    sizes |= {"learning-rate": 1e-4, "steps": steps, "eval-every": EVERY if device == "cuda" else 1}
    # TRL is in a folder of its own beside verl.
    path = os.pathsep.join([environment()["PYTHONPATH"], f"{sys.prefix}/trl"])
    for method in METHODS:
        with outcome.attempt(f"{method} in TRL"):
            run_dir = RUNS / "trl" / method
            command = [sys.executable, "examples/trl_grail.py", "--method", method, "--output", str(run_dir)]
            command += ["--model", str(data / MODEL_FOLDER), "--data", str(data / "train.parquet")]
            command += ["--held-out", str(data / "validation.parquet")]
            command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
            judge(outcome, method, method, train(outcome, method, command, run_dir, steps, PYTHONPATH=path))
