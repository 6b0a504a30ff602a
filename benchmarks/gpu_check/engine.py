"""Part c: the training side of the published recipe on one GPU, at the shapes of Qwen3-0.6B and Qwen3-4B.

Engine, precision, micro-batches, checkpointing, epochs and loss are those that ``examples/run_qwen3_grail.sh`` gives
verl. GRPO, ``uniform`` and GRAIL run in turn on one engine, the latter two with responses of advantage 0 left out or not,
and with old log-probabilities of a forward of their own or of the update's.
"""

import os
import subprocess
import sys
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks import timer
from benchmarks.bench_training_step import ONE_EPOCH, run_variants, stage_peaks
from benchmarks.gpu_check.__main__ import ROOT, Outcome
from benchmarks.setup import Setup, prepare_process, release

RECIPE = ROOT / "examples/run_qwen3_grail.sh"
ROWS_REPEATS = {"Qwen3-0.6B": (8, 2), "Qwen3-4B": (4, 1), "toy": (8, 1)}
"""Responses of the batch, and repeats: about a minute each on an H100."""
STEP_LIMIT = 0.9
"""Most that GRAIL may add to a step of one epoch, as a share of GRPO's step for each share of scored responses: 0.34 with
three of eight. By multiplications it is 0.24 to 0.28 then: two forwards, one as checkpointing repeats it, and a backward
to activations, which costs one forward of each linear layer and 2.5 of attention."""
FORWARD = 0.15
"""Least share of GRPO's step of one epoch that an update's own forward must save: a forward is 0.2 of it."""


def run(outcome: Outcome, device: str) -> None:
    """All checks; on the CPU at toy size. Where the recipe's micro-batch does not fit, responses go one at a time."""
    prepare_process(device)
    config = recipe()
    tokens = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    full = max(1, config["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] // tokens)
    for shape in ("Qwen3-0.6B", "Qwen3-4B") if device == "cuda" else ("toy",):
        for together in (full, 1):
            with outcome.attempt(f"{shape}, {together} at once"):
                training_side(outcome, config, device, shape, together)
                # Here it has fitted; attempt() ends the block where it does not.
                if device == "cuda":
                    break
            release()
        release()


def recipe() -> dict[str, Any]:
    """The configuration that the recipe's script gives verl; the script starts nothing."""
    environment = {**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    environment.pop("VERL_PLATFORM", None)
    done = subprocess.run(["bash", RECIPE], env=environment, stdout=subprocess.PIPE, check=True)
    return yaml.safe_load(done.stdout)


def training_side(
    outcome: Outcome, config: dict[str, Any], device: str, shape: str, together: int
) -> None:
    """Steps of all variants in turn, and the peaks of their stages. GRAIL's step must cost what its multiplications say,
    and its pass must fit where verl's own stages do."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from benchmarks.verl_host import VerlHost, make_worker
    from grail_advantage.verl_ext import exchange
    from grail_advantage.verl_ext.engine_model import EngineModel
    from verl_cpu.patches import log_probabilities_in_few_calls

    name = f"{shape}, {together} at once"
    options = OmegaConf.create(config["actor_rollout_ref"]["actor"])
    # 4 GB a billion parameters less in the optimiser's step
    if together == 1:
        options.optim.override_optimizer_config = {"foreach": False}
    actor = omega_conf_to_dataclass(options)
    # The trainer sets it
    actor.optim.total_training_steps = 1000
    prompt = 8
    response = 72
    if device == "cuda":
        prompt = config["data"]["max_prompt_length"]
        response = config["data"]["max_response_length"]
    rows, repeats = ROWS_REPEATS[shape]
    scored = round(3 * rows / 8)
    without = rows // 4
    # bfloat16 is the file's that verl loads; the engine's precision is the recipe's
    setup = Setup(device, shape, rows, prompt + response, prompt, together, torch.bfloat16)
    layout = "packed"
    if not setup.packed:
        # As in a run; verl 0.9.1 takes them token by token then, which for 41,000 tokens has no end. Its fused kernels
        # would do, too, but they fail with FSDP2, which the recipe has.
        log_probabilities_in_few_calls()
        layout = "padded, as flash-attn is not installed; log-probabilities in few calls"
    host = VerlHost(make_worker(setup, True, actor), setup.rollouts(scored, without))
    table = run_variants(host, repeats, actor.ppo_epochs)
    note = (
        f"{setup.attention}, {layout}. Parameters in {actor.engine.model_dtype}, computing in {actor.engine.dtype}. "
        f"{rows} responses of {setup.tokens} tokens, {together} in a micro-batch, {scored} scored, {without} without "
        "advantage, gradient checkpointing. Further epochs by the first's seconds."
    )
    outcome.figures(f"Training side, {name}", table, note)
    limit_of_step = 1 + STEP_LIMIT * scored / rows
    for variant, limit in (
        ("GRAIL", limit_of_step),
        ("GRAIL, own forward", limit_of_step - FORWARD),
    ):
        ratios = table[variant][ONE_EPOCH]
        detail = f"{timer.cell(ratios)} x (at most {limit:.3g}; on a CPU times mean nothing)"
        holds = median(ratios) <= limit if device == "cuda" else None
        outcome.check(f"{name}: a step of one epoch of {variant} against GRPO's", holds, detail)

    peaks = stage_peaks(host)
    outcome.figures(f"Peak memory, {name}", peaks, "The optimiser's state is there in every stage.")
    verls = max(peaks[stage]["GiB"] for stage in ("old log-probabilities", "actor update"))
    for stage in ("GRAIL's pass", "actor update, own forward"):
        share = peaks[stage]["GiB"] / verls
        outcome.check(
            f"{name}: {stage} needs no more memory than verl's stages",
            share <= 1,
            f"{share:.2f} x their peak",
        )
    for layout in (exchange.UPDATE, exchange.FORWARD):
        with host.engine.eval_mode():
            finding = EngineModel(host.engine, temperature=1.0).probe(layout, setup.tokens)
        outcome.check(
            f"{name}: a response is the same beside others, {layout}", finding.holds, str(finding)
        )
