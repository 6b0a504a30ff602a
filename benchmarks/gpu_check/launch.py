"""Part l: the launch script on one GPU, before hours are spent on it. First the trainer's arithmetic
(:mod:`benchmarks.gpu_check.machine`), then ``examples/run_one_gpu_grail.sh`` itself on a model of 0.65 M parameters: two
steps of GRAIL, killed after the first, and the same command again. On the CPU the same script, with ``VERL_PLATFORM=cpu``.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.__main__ import ROOT, Outcome
from verl_cpu.tiny.prepare import write
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import random_problems

SETTINGS = """
EXPERIMENT_NAME=rehearsal ADV_ESTIMATOR=grail MAX_PROMPT_LENGTH=32 MAX_RESPONSE_LENGTH=64 PPO_MAX_TOKEN_LEN_PER_GPU=8192
ACTOR_LR=2e-4 TOTAL_STEPS=2 SAVE_FREQ=1 TEST_FREQ=2
MODEL_PATH={0}/model TRAIN_FILE={0}/train.parquet TEST_FILE={0}/validation.parquet
"""
"""Variables of the script, by the folder of model and data; all others are as a user finds them."""
VARIABLES_ON_CPU = "VERL_PLATFORM=cpu TRAIN_BATCH_SIZE=8"
OVERRIDES_ON_CPU = """
hydra.searchpath=[pkg://verl/trainer/config,pkg://grail_advantage/verl_ext/config,pkg://verl_cpu] +config=cpu
data.filter_overlong_prompts_workers=1 data.dataloader_num_workers=0
"""
STAGES = (
    "step gen old_log_prob token_weights_pass update_actor update_weights save_checkpoint testing"
)
WAIT = 10
"""Seconds between the kill and the second start."""


def run(outcome: Outcome, device: str) -> None:
    """All checks of the part."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine", device]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as machine:
        for line in machine.stdout or ():
            # Libraries print more
            if line.startswith('["'):
                outcome.check(*json.loads(line))
    outcome.check(
        "these checks come to their end",
        machine.returncode == 0,
        f"exit status {machine.returncode}",
    )

    # Of the time limit, so that the script ends, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rehearse(outcome, device, outcome.path.parent / "launch")


def rehearse(outcome: Outcome, device: str, folder: Path) -> None:
    """Two starts of one command in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "demo").mkdir(parents=True)
    problems = random_problems(320)
    write(folder / "demo", *load_shipped(), {"train": problems[:256], "validation": problems[256:]})
    metrics = folder / "run/metrics.jsonl"
    detail = start(device, folder, kill=True)
    first = steps(metrics)
    outcome.check("the script takes a step", 1 in first, detail)
    if 1 not in first:
        return
    # The killed driver's workers end by themselves, and give the GPU back.
    time.sleep(WAIT)
    detail = start(device, folder, kill=False)
    second = steps(metrics)
    outcome.check(
        "killed by SIGKILL, the same command resumes and ends",
        detail.startswith("exit status 0"),
        detail,
    )
    once = {**second, 1: first[1]} == second and max(second) == 2
    outcome.check("each step is taken once", once, f"steps {', '.join(map(str, second))}")
    rate = first[1]["grail/selected_rate"]
    outcome.check("GRAIL weighs tokens", rate > 0, f"in {rate:.0%} of the responses")
    table = {
        stage: {f"step {step}": second[step].get(f"timing_s/{stage}", "") for step in (1, 2)}
        for stage in STAGES.split()
    }
    outcome.figures("Seconds by stage", table, "The step as a whole first.")


def start(device: str, folder: Path, kill: bool) -> str:
    """Run the script until it ends, or until step 1 is logged; how it ended."""
    settings = [setting.format(folder / "demo") for setting in SETTINGS.split()]
    overrides = [f"run.folder='{folder}/run'"]
    if device == "cpu":
        settings += VARIABLES_ON_CPU.split()
        overrides += OVERRIDES_ON_CPU.split()
    script = ROOT / "examples/run_one_gpu_grail.sh"
    command = ["env", *settings, f"PYTHON={sys.executable}", "bash", script, *overrides]
    path = folder / ("killed.log" if kill else "resumed.log")
    began = time.monotonic()
    with path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            if kill and 1 in steps(folder / "run/metrics.jsonl"):
                # The driver: env, bash and Python are one process.
                process.kill()
            time.sleep(1)
    finally:
        process.kill()
    return f"exit status {process.returncode} after {time.monotonic() - began:.0f} s; {path}"


def steps(metrics: Path) -> dict[int, dict]:
    """What verl's file logger has written, by step."""
    if not metrics.is_file():
        return {}
    lines = metrics.read_text().splitlines(keepends=True)
    # The last one may be half written
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {entry["step"]: entry["data"] for entry in entries}
