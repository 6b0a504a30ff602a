"""Part d: the smoke run (``scripts/smoke_run.sh``): two training steps with vLLM on one GPU, a second start, and the evaluation
of the checkpoint. ``MODEL_PATH`` names another model than the script's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from gpu_check.outcome import Outcome
from gpu_check.parts import ROOT, last_line, run_command

SCRIPT = "scripts/smoke_run.sh"
FOLDER = ROOT / "outputs" / "smoke" / "run_one_gpu_grail-grail"
"""Where the script leaves everything."""
SHOWN = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/token_weights",
    "timing_s/update_actor",
    "actor/perf/max_memory_allocated_gb",
    "response_length/mean",
    "response_length/clip_ratio",
    "critic/score/mean",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "actor/grad_norm",
    "grail/answer_found_rate",
    "grail/selected_rate",
    "grail/average_weight",
)
"""Metrics of the last step that the page shows, where verl logs them."""


def run(outcome: Outcome, device: str = "cuda", folder: Path = FOLDER) -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: the script finds it itself.
        folder: what the script leaves; its checkpoint is removed afterwards.
    """
    for knob in ("SCRIPT", "ADV_ESTIMATOR", "DRY_RUN"):
        os.environ.pop(knob, None)  # the folder is named after them
    os.environ["PYTHON"] = sys.executable
    summary = folder / "smoke.json"
    summary.unlink(missing_ok=True)
    try:
        code, output = run_command(["bash", SCRIPT])
        if summary.exists():
            for claim in json.loads(summary.read_text(encoding="utf-8")):
                outcome.check(claim["what"], claim["proved"], claim["figure"])
        outcome.check(
            "the smoke run proves everything",
            code == 0,
            "it does" if code == 0 else f"exit status {code}: {last_line(output)}",
        )
        with outcome.attempt("metrics of the smoke run"):
            outcome.figures("smoke run", last_step(folder / "metrics.jsonl"))
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 12 bytes a parameter


def last_step(metrics: Path) -> dict[str, float]:
    """The metrics that the page shows, of the last step."""
    records: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last = max(records, key=lambda record: record["step"])["data"]
    return {name: round(last[name], 4) for name in SHOWN if name in last}
