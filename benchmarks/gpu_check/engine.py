"""Part c: the training side of the published recipe on one GPU, with verl's engine, at the shapes of Qwen3-0.6B and Qwen3-4B.

Engine, precision, micro-batches, epochs and loss are those that ``examples/run_qwen3_grail.sh`` gives verl, read from its
configuration. GRPO (base advantages on every row, in this project's worker, which runs verl's methods), ``uniform`` and GRAIL
run in turn, the latter two with rows of advantage 0 left out and not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks.bench_training_step import GRPO, VARIANTS, ratios, run_variant
from benchmarks.gpu_check.outcome import Outcome
from benchmarks.gpu_check.parts import ROOT
from benchmarks.measuring import Clock, in_turn, peak_memory
from benchmarks.random_model import SHAPES, release
from benchmarks.setup import ROW_BY_ROW, Setup, packed_attention, prepare_process

RECIPE = "examples/run_qwen3_grail.sh"
MARGIN = 0.05
"""What a step may take above :func:`account`, as a share of GRPO's."""
ROWS, SELECTED, NEUTRAL = 8, 3, 2
"""Rows of the batch; of them those that GRAIL scores, and those whose group has no advantage."""
REPEATS = 6
RUNS = (("Qwen3-0.6B", False, 20), ("Qwen3-0.6B", True, 60), ("Qwen3-4B", True, 60))
"""Shape, gradient checkpointing, and seconds after which no further repeat begins. Without checkpointing the activations of
Qwen3-4B's micro-batch fit on no GPU."""
DRY_RUNS = (("toy", False, 0), ("toy", True, 0))
WITHOUT = "torch's attention row by row, log-probabilities in chunks: flash-attn is not installed"
UPDATE, GRAIL_PASS = "actor update", "with GRAIL's backward"


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with a toy shape, short rows and one repeat.
    """
    prepare_process(device)
    with outcome.attempt("the recipe's configuration"):
        config = recipe()
        for shape, checkpointing, seconds in RUNS if device == "cuda" else DRY_RUNS:
            name = f"{shape}, checkpointing {'on' if checkpointing else 'off'}"
            with outcome.attempt(f"training side, {name}"):
                training_side(outcome, name, config, device, shape, checkpointing, seconds)
    with outcome.attempt("seconds of the saliency"):
        seconds_of_work(outcome, device)


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


def actor_of(config: dict[str, Any]) -> Any:
    """verl's settings of the actor, of the recipe's configuration."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(OmegaConf.create(config["actor_rollout_ref"]["actor"]))
    actor.optim.total_training_steps = 1000  # the trainer sets it
    return actor


def account(shape: Mapping[str, int], tokens: int, checkpointing: bool) -> float:
    """A step of one epoch with GRAIL as a multiple of GRPO's, by multiplications.

    A backward to the inputs of a linear layer costs one forward of it, one to its weights another. A kernel's backward through
    attention costs 2.5 forwards of it, whatever is asked for. With checkpointing each backward runs the forward again.
    """
    hidden, width = shape["hidden_size"], shape["head_dim"] * shape["num_attention_heads"]
    keys = shape["head_dim"] * shape["num_key_value_heads"]
    block = 2 * hidden * (width + keys) + 3 * hidden * shape["intermediate_size"]
    linear = shape["num_hidden_layers"] * block + hidden * shape["vocab_size"]
    attention = shape["num_hidden_layers"] * width * tokens  # two products with half of the row on average
    share = attention / (linear + attention)
    again = 1 if checkpointing else 0
    of_inputs = 1 - share + 2.5 * share
    step = 1 + (1 + 2 * (1 - share) + 2.5 * share + again)
    return 1 + SELECTED / ROWS * (of_inputs + again) / step


def training_side(
    outcome: Outcome,
    name: str,
    config: dict[str, Any],
    device: str,
    shape: str,
    checkpointing: bool,
    limit: float,
) -> None:
    """Steps of all variants in turn for some seconds, and the peaks of their stages; kept after each repeat."""
    actor, data = actor_of(config), config["data"]
    prompt, response = data["max_prompt_length"], data["max_response_length"]
    if device == "cpu":
        prompt, response = 8, 72
    epochs, budget, tokens = actor.ppo_epochs, actor.ppo_max_token_len_per_gpu, prompt + response
    rows = max(1, budget // tokens) if device == "cuda" else 4
    setup = Setup(
        device,
        SHAPES[shape],
        rows=ROWS,
        tokens=tokens,
        prompt=prompt,
        micro_batch_rows=rows,
        parameter_dtype="bf16",  # of the file that verl loads; the engine's are the recipe's
        compute_dtype="bf16",
        layout="packed",
        attention=packed_attention() if device == "cuda" else ROW_BY_ROW,
    )
    from benchmarks.training_side import Rollouts, TrainingSide, make_worker

    attention = WITHOUT if setup.attention == ROW_BY_ROW else f"flash-attn {version('flash-attn')}"
    note = (
        f"{attention}. Parameters in {actor.engine.model_dtype}, "
        f"computing in {actor.engine.dtype}. {ROWS} rows x {tokens} tokens, {SELECTED} scored, {NEUTRAL} without advantage, "
        f"micro-batches of {rows * tokens} tokens."
    )
    clock, repeats = Clock(device), []
    worker = side = None
    try:
        worker = make_worker(setup, checkpointing, actor)
        side = TrainingSide(
            worker, Rollouts(ROWS, prompt, response, SELECTED, setup.shape["vocab_size"], NEUTRAL), actor
        )
        agree, detail = True, "fused and separate pass"
        try:
            side.check()
        except SystemExit as error:
            agree, detail = False, str(error)
        outcome.check(f"{name}: saliencies of two ways agree", agree, detail)
        judge_memory(outcome, name, peaks(side, device))
        begun = time.monotonic()
        ways = {variant: partial(run_variant, side, variant, clock, epochs) for variant in VARIANTS}
        for repeat in in_turn(ways, warm=False):
            repeats.append(repeat)
            outcome.figures(f"Seconds, {name}", seconds_of(repeats, epochs), note)
            if len(repeats) == REPEATS or time.monotonic() - begun >= limit:
                break
        judge_step(outcome, name, repeats, device, account(setup.shape, tokens, checkpointing) + MARGIN)
    finally:
        del worker, side
        release()


def seconds_of(repeats: list[dict[str, list[float]]], epochs: int) -> dict[str, dict[str, list[float]]]:
    """By variant, seconds of steps of one epoch and of all, and both as multiples of GRPO's in the same repeat."""
    return {
        variant: {
            f"{count} epochs, {what}": values
            for count in sorted({1, epochs})
            for what, values in (
                ("seconds", [sum(repeat[variant][: count + 1]) for repeat in repeats]),
                ("x GRPO", ratios(repeats, variant, GRPO, count)),
            )
        }
        for variant in VARIANTS
    }


def peaks(side: Any, device: str) -> dict[str, int]:
    """Peak bytes of each stage alone, after a first update: the optimiser's state is there, as in all steps but the first."""
    from grail_advantage import GrailConfig

    log_probs = side.old_log_probs()["log_probs"]
    side.update(log_probs, side.base_advantages())
    stages: dict[str, Callable[[], Any]] = {
        "old log-probabilities": side.old_log_probs,
        GRAIL_PASS: lambda: side.fused_log_probs(GrailConfig("official")),
        UPDATE: lambda: side.update(log_probs, side.base_advantages()),
    }
    return {name: peak_memory(device, stage) for name, stage in stages.items()}


def judge_memory(outcome: Outcome, name: str, found: dict[str, int]) -> None:
    """GRAIL's pass must fit where the update does."""
    rows = {stage: {"GiB": peak / 2**30, "x the update's": peak / found[UPDATE]} for stage, peak in found.items()}
    outcome.figures(f"Peak memory, {name}", rows, "The optimiser's state is there in every stage.")
    share = found[GRAIL_PASS] / found[UPDATE]
    outcome.check(f"{name}: GRAIL's pass needs no more memory than the update", share <= 1, f"{share:.2f} x its peak")


def judge_step(outcome: Outcome, name: str, repeats: list[dict[str, list[float]]], device: str, limit: float) -> None:
    """GRAIL's step must cost what the account says."""
    found, step = ratios(repeats, "GRAIL", GRPO, 1), f"{name}: GRAIL's step of one epoch against GRPO's"
    detail = f"{median(found):.3f} x, {min(found):.3f} to {max(found):.3f}"
    if device == "cpu":
        outcome.not_run(step, f"{detail}: a rehearsal's times mean nothing")
    else:
        outcome.check(step, median(found) <= limit, f"{detail} (at most {limit:.2f}, by the account and {MARGIN:.0%})")


def seconds_of_work(outcome: Outcome, device: str, products: int = 100) -> None:
    """``timing_s/token_weights`` is what the GPU works, not the moment that the host takes to hand it out."""
    if device != "cuda":
        outcome.not_run("seconds of the saliency are the GPU's", "needs a GPU")
        return
    from grail_advantage.verl_ext.worker import DeviceWatch

    watch, matrix_DD = DeviceWatch(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with watch.running():
        for _ in range(products):
            matrix_DD @ matrix_DD
    handed_out = time.perf_counter() - start
    seconds = watch.seconds()
    until_end = time.perf_counter() - start
    outcome.check(
        "seconds of the saliency are the GPU's",
        handed_out < seconds <= until_end,
        f"{seconds:.3f} s, handed out in {handed_out:.3f} s, over after {until_end:.3f} s",
    )
