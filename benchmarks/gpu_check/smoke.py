"""Part d: the smoke run. Two training steps with vLLM on one GPU by ``examples/run_one_gpu_grail.sh``, then the evaluation of
their checkpoint. ``MODEL_PATH`` and ``DATA_DIR`` are that script's; data that is not there is prepared first.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.outcome import Outcome
from gpu_check.parts import ROOT, last_line, run_command

STEPS = 2
PROJECT_NAME = "gpu_check"
KNOBS = {
    "NNODES": "1",
    "NGPUS_PER_NODE": "1",
    "TRAIN_BATCH_SIZE": "16",
    "TOTAL_STEPS": str(STEPS),
    "SAVE_FREQ": str(STEPS),
    "TEST_FREQ": "-1",
    "MAX_RESPONSE_LENGTH": "2048",
    "PROJECT_NAME": PROJECT_NAME,
    "LOGGER": "console,file",
}
TRAINING = (
    "examples/run_one_gpu_grail.sh",
    "trainer.val_before_train=False",
    "actor_rollout_ref.rollout.calculate_log_probs=True",  # how far vLLM's probabilities are from the trainer's
)
SAMPLING = ("--benchmarks", "amc23", "--samples", "1", "--max-tokens", "2048")
TRAINING_DATA, BENCHMARKS = "deepmath", ("amc23", "aime24")
FINITE = ("actor/pg_loss", "actor/grad_norm", "grail/average_weight")
"""Metrics that every step must have."""
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
    "grail/answer_found_rate",
    "grail/selected_rate",
    "grail/non_finite_rate",
    *FINITE,
)
"""Metrics of the last step that the page shows, where verl logs them."""


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: the scripts find it themselves.
    """
    # A name of its own: a run goes on from a checkpoint under its name.
    name = time.strftime("smoke-%Y%m%d-%H%M%S", time.gmtime())
    folder = ROOT / "outputs" / PROJECT_NAME / name
    data = Path(os.environ.get("DATA_DIR") or ROOT / "data")
    os.environ.update(KNOBS, EXPERIMENT_NAME=name, DATA_DIR=str(data), PYTHON=sys.executable)
    try:
        if (
            _step(outcome, "the data is there", preparation(data))
            and _step(outcome, f"{STEPS} training steps run to their end", TRAINING)
            and judge_training(outcome, folder / "metrics.jsonl")
        ):
            checkpoint = folder / "checkpoints" / f"global_step_{STEPS}"
            words = ("--model", str(checkpoint), "--data-dir", str(data), "--output-dir", str(folder / "evaluation"))
            if _step(outcome, "their checkpoint is evaluated", ("scripts/evaluate.sh", *words, *SAMPLING)):
                judge_evaluation(outcome, folder / "evaluation" / "results.json")
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 12 bytes a parameter


def preparation(data: Path) -> Sequence[str]:
    """The script that prepares the data, with its arguments; nothing where it is all there."""
    if all((data / f"{name}.parquet").is_file() for name in (TRAINING_DATA, *BENCHMARKS)):
        return ()
    return (
        "scripts/prepare_data.sh",
        *("--train", TRAINING_DATA, "--benchmarks", ",".join(BENCHMARKS), "--output-dir", str(data)),
    )


def _step(outcome: Outcome, name: str, script: Sequence[str]) -> bool:
    if not script:
        return True
    start = time.monotonic()
    code, output = run_command(["bash", *script])
    said = f"{time.monotonic() - start:.0f} s" if code == 0 else f"exit status {code}: {last_line(output)}"
    outcome.check(name, code == 0, said)
    return code == 0


def judge_training(outcome: Outcome, metrics: Path) -> bool:
    """Every step is in the metrics file with finite figures of its loss, gradient and weights; False where not."""
    records = (
        [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    )
    steps: dict[int, dict[str, Any]] = {record["step"]: record["data"] for record in records}
    wrong = [
        f"{name} at step {step} is {steps.get(step, {}).get(name)}"
        for step in range(1, STEPS + 1)
        for name in FINITE
        if not math.isfinite(steps.get(step, {}).get(name, math.nan))
    ]
    outcome.check("loss, gradient and weights are finite in every step", not wrong, "; ".join(wrong) or "all of them")
    last = steps.get(STEPS, {})
    outcome.figures("smoke run", {name: round(last[name], 4) for name in SHOWN if name in last})
    return not wrong


def judge_evaluation(outcome: Outcome, results: Path) -> None:
    """The evaluation reported on every problem."""
    found = json.loads(results.read_text(encoding="utf-8"))["benchmarks"]["amc23"]
    said = f"{found['problems']} problems, {100 * found['acc@1']['value']:.0f} % right, {found['truncated']['count']} truncated"
    outcome.check("the evaluation reports", found["responses"] == found["problems"] > 0, said)
