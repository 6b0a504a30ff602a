"""Part c: the training side of the published recipe on one GPU, with verl's engine, at the shapes of Qwen3-0.6B and Qwen3-4B.

Engine, precision, micro-batches, epochs and loss are those that ``examples/run_qwen3_grail.sh`` gives verl, read from its
configuration. verl's own GRPO, ``uniform`` and GRAIL run in turn on one engine, the latter two with responses of advantage 0
left out and not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks import timer
from benchmarks.bench_training_step import GRPO, VARIANTS, ratios, run_variant
from benchmarks.gpu_check.outcome import Outcome
from benchmarks.made_up import SHAPES, made_up_rollouts, release
from benchmarks.setup import Setup, prepare_process
from grail_advantage import Grail

ROOT = Path(__file__).parents[2]
RECIPE = "examples/run_qwen3_grail.sh"
STEP_LIMIT = 1.25
"""Most that a step of one epoch with GRAIL may take, as a multiple of GRPO's. By multiplications it is 1.17 to 1.20 with three
responses of eight scored: a backward to activations costs one forward of each linear layer and 2.5 of attention, and with
checkpointing a forward more."""
ROWS, SELECTED, ZERO_ADVANTAGE = 8, 3, 2
"""Responses of the batch; of them those that GRAIL scores, and those whose group has no advantage."""
REPEATS = 6
RUNS = (("Qwen3-0.6B", True, 50), ("Qwen3-0.6B", False, 20), ("Qwen3-4B", True, 90))
"""Shape, gradient checkpointing, and seconds after which no further repeat begins. Without checkpointing the activations of
Qwen3-4B's micro-batch fit on no GPU."""
DRY_RUNS = (("toy", False, 0), ("toy", True, 0))
UPDATE, GRAIL_PASS = "actor update", "with GRAIL's backward"


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part; on the CPU a toy shape, short responses and one repeat."""
    prepare_process(device)
    config = recipe()
    for shape, checkpointing, limit in RUNS if device == "cuda" else DRY_RUNS:
        name = f"{shape}, checkpointing {'on' if checkpointing else 'off'}"
        with outcome.attempt(f"training side, {name}"):
            training_side(outcome, name, config, device, shape, checkpointing, limit)
        release()


def recipe() -> dict[str, Any]:
    """The configuration that the recipe's script gives verl; the script starts nothing.

    Raises:
        RuntimeError: the script fails.
    """
    environment = {**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    environment.pop("VERL_PLATFORM", None)
    done = subprocess.run(["bash", RECIPE], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError(f"DRY_RUN=1 {RECIPE} ends with status {done.returncode}: {(errors or ['no error'])[-1]}")
    return yaml.safe_load(done.stdout)


def training_side(
    outcome: Outcome, name: str, config: dict[str, Any], device: str, shape: str, checkpointing: bool, limit: float
) -> None:
    """Steps of all variants in turn for some seconds, kept after each repeat, and the peaks of their stages. GRAIL's step must
    cost what its multiplications say, and its pass must fit where the update does."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from benchmarks.verl_host import VerlHost, make_worker
    from grail_advantage.verl_ext import exchange
    from grail_advantage.verl_ext.engine_model import EngineModel

    actor, data = omega_conf_to_dataclass(OmegaConf.create(config["actor_rollout_ref"]["actor"])), config["data"]
    actor.optim.total_training_steps = 1000  # the trainer sets it
    prompt, response = (data["max_prompt_length"], data["max_response_length"]) if device == "cuda" else (8, 72)
    epochs, tokens = actor.ppo_epochs, prompt + response
    setup = Setup(
        device,
        SHAPES[shape],
        rows=ROWS,
        tokens=tokens,
        prompt=prompt,
        micro_batch_rows=max(1, actor.ppo_max_token_len_per_gpu // tokens) if device == "cuda" else 4,
        parameter_dtype="bf16",  # of the file that verl loads; the engine's are the recipe's
        compute_dtype="bf16",
    )
    note = (
        f"{setup.attention}, {'packed' if setup.packed else 'padded: flash-attn is not installed'}. "
        f"Parameters in {actor.engine.model_dtype}, computing in {actor.engine.dtype}. {ROWS} responses of {tokens} tokens, "
        f"{SELECTED} scored, {ZERO_ADVANTAGE} without advantage, {setup.micro_batch_rows} in a micro-batch."
    )
    rollouts = made_up_rollouts(ROWS, tokens, prompt, setup.shape["vocab_size"], SELECTED, ZERO_ADVANTAGE)
    host, repeats = VerlHost(make_worker(setup, checkpointing, actor), rollouts, actor), []
    for variant in VARIANTS:  # a first step also compiles and fills caches
        run_variant(host, variant, 1)
    begun = time.monotonic()
    variants = {variant: partial(run_variant, host, variant, epochs) for variant in VARIANTS}
    for repeat in timer.in_turn(variants, REPEATS, warm=False):
        repeats.append(repeat)
        outcome.figures(
            f"Seconds, {name}", {variant: seconds_of(repeats, variant, epochs) for variant in VARIANTS}, note
        )
        if time.monotonic() - begun >= limit:
            break
    found = ratios(repeats, "GRAIL", GRPO, 1)
    detail = f"{median(found):.3f} x, {min(found):.3f} to {max(found):.3f} (at most {STEP_LIMIT}; on a CPU times mean nothing)"
    holds = median(found) <= STEP_LIMIT if device == "cuda" else None
    outcome.check(f"{name}: GRAIL's step of one epoch against GRPO's", holds, detail)

    stages = {
        "old log-probabilities": host.forward,
        GRAIL_PASS: lambda: host.forward(Grail("official")),
        UPDATE: lambda: host.update(host.base_advantages()),
    }
    peaks = {stage: timer.peak_memory(device, run) for stage, run in stages.items()}
    rows = {stage: {"GiB": peak / 2**30, "x the update's": peak / peaks[UPDATE]} for stage, peak in peaks.items()}
    outcome.figures(
        f"Peak memory, {name}", rows, "After optimiser steps: the optimiser's state is there in every stage."
    )
    share = peaks[GRAIL_PASS] / peaks[UPDATE]
    outcome.check(f"{name}: GRAIL's pass needs no more memory than the update", share <= 1, f"{share:.2f} x its peak")
    outcome.check(f"{name}: the saliency of the shared forward is that of a pass of its own", *host.agreement())
    for layout in (exchange.UPDATE, exchange.FORWARD):
        with host.engine.eval_mode():
            model = EngineModel(host.engine, temperature=1.0)
            finding = model.probe(layout, torch.arange(setup.shape["vocab_size"]), tokens)
        outcome.check(f"{name}: a response is the same beside others, {layout}", finding.holds, str(finding))


def seconds_of(repeats: list[dict[str, list[float]]], variant: str, epochs: int) -> dict[str, list[float]]:
    """Seconds of a variant's steps of one epoch and of all, and both as multiples of GRPO's in the same repeat."""
    columns = {}
    for count in sorted({1, epochs}):
        columns[f"{count} epochs, seconds"] = [sum(repeat[variant][: count + 1]) for repeat in repeats]
        columns[f"{count} epochs, x GRPO"] = ratios(repeats, variant, GRPO, count)
    return columns
