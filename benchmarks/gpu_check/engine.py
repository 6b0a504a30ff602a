"""Part c: the training side of the published recipe on one GPU, with verl's engine, at the shapes of Qwen3-0.6B and Qwen3-4B.

Engine, precision, micro-batches, epochs and loss are those that ``examples/run_qwen3_grail.sh`` gives verl, read from its
configuration. Stock GRPO, ``uniform`` and GRAIL run in turn, the latter two with rows of advantage 0 left out and not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from bench_neutral_rows import GRPO, VARIANTS, run_step
from environment import set_up
from measuring import Clock, median, peak_memory

from gpu_check.outcome import Outcome
from gpu_check.parts import ROOT
from gpu_check.plain import FULL, TOY

RECIPE = "examples/run_qwen3_grail.sh"
STEP_LIMIT = 1.18
"""Most that a GRAIL step of one epoch should cost, in GRPO steps: 3 of 8 rows at 2 F of the account's 5 F is 1.15."""
ROWS, SELECTED, NEUTRAL = 8, 3, 2
"""Rows of the batch; of them those that GRAIL scores, and those whose group has no advantage."""
REPEATS = 6
RUNS = (("Qwen3-0.6B", True, 100), ("Qwen3-4B", True, 140), ("Qwen3-0.6B", False, 40), ("Qwen3-4B", False, 20))
"""Shape, gradient checkpointing, and seconds after which no third and no further repeat begins."""
DRY_RUNS = (("toy", True, 0), ("toy", False, 0))
WITHOUT = "torch's attention row by row, log-probabilities in chunks: flash-attn is not installed"


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with a toy shape, short rows and two repeats.
    """
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"  # verl looks while it is imported
    with outcome.attempt("the recipe's configuration"):
        config = recipe()
        for shape, checkpointing, seconds in RUNS if device == "cuda" else DRY_RUNS:
            name = f"{shape}, checkpointing {'on' if checkpointing else 'off'}"
            with outcome.attempt(f"training side, {name}"):
                training_side(outcome, name, config, device, (FULL.shapes | TOY.shapes)[shape], checkpointing, seconds)
    with outcome.attempt("verl's fused kernels"):
        fused_kernels(outcome, device)
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


def actor_of(config: dict[str, Any], device: str) -> Any:
    """verl's settings of the actor, of the recipe's configuration."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(OmegaConf.create(config["actor_rollout_ref"]["actor"]))
    actor.optim.total_training_steps = 1000  # the trainer sets it
    return actor


def layers_that_fit(shape: dict[str, int], device: str, budget: int) -> int:
    """Layers of a shape whose training fits on the GPU: 20 bytes a parameter while Adam steps, logits with their gradient, and
    8 GiB for the rest."""
    if device != "cuda":
        return shape["num_hidden_layers"]
    hidden, heads, keys = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    embeddings = 20 * hidden * shape["vocab_size"]
    block = 20 * (2 * hidden * shape["head_dim"] * (heads + keys) + 3 * hidden * shape["intermediate_size"])
    block += 2 * budget * hidden  # the checkpointed input
    logits = 6 * budget * shape["vocab_size"]
    room = torch.cuda.get_device_properties(0).total_memory - 8 * 2**30 - embeddings - logits
    return max(1, min(shape["num_hidden_layers"], int(room // block)))


def training_side(
    outcome: Outcome,
    name: str,
    config: dict[str, Any],
    device: str,
    shape: dict[str, int],
    checkpointing: bool,
    limit: float,
) -> None:
    """Steps of all variants in turn for some seconds, and the peaks of their stages; kept after each repeat."""
    actor, data = actor_of(config, device), config["data"]
    prompt, response = data["max_prompt_length"], data["max_response_length"]
    if device == "cpu":
        prompt, response = 8, 72
    epochs, budget = actor.ppo_epochs, actor.ppo_max_token_len_per_gpu
    tokens = prompt + response
    rows = max(1, budget // tokens) if device == "cuda" else 4
    layers = layers_that_fit(shape, device, budget)
    args = argparse.Namespace(
        device=device,
        threads=torch.get_num_threads(),
        layers=layers,
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocabulary=shape["vocab_size"],
        rows=ROWS,
        tokens=tokens,
        prompt=prompt,
        micro_batch_rows=rows,
        parameter_dtype="bf16",  # of the file that verl loads; the engine's are the recipe's
        compute_dtype="bf16",
        layout="packed",
        attention="flash_attention_2" if device == "cuda" else "packed_rows",
    )
    set_up(args)
    from training_side import Rollouts, TrainingSide, make_worker, release

    figures: dict[str, Any] = {
        "layers": f"{layers} of {shape['num_hidden_layers']}",
        "attention": WITHOUT if args.attention == "packed_rows" else f"flash-attn {version('flash-attn')}",
        "parameters": f"{actor.engine.model_dtype}, computing in {actor.engine.dtype}",
        "batch": f"{ROWS} rows x {tokens} tokens, {SELECTED} scored, {NEUTRAL} without advantage, "
        f"micro-batches of {rows * tokens} tokens",
        "epochs": epochs,
        "repeats": [],
        "peak_bytes": {},
    }
    clock = Clock(device, args.threads)
    worker = side = None
    try:
        worker = make_worker(args, checkpointing, actor)
        side = TrainingSide(worker, Rollouts(ROWS, prompt, response, SELECTED, args.vocabulary, NEUTRAL), actor)
        side.check()
        outcome.check(f"{name}: saliencies of three ways agree", True, "fused, separate and published pass")
        figures["peak_bytes"] = peaks(side, device)
        outcome.figures(f"training side, {name}", figures)
        begun = time.monotonic()
        while len(figures["repeats"]) < REPEATS and (time.monotonic() - begun < limit or len(figures["repeats"]) < 2):
            shift = len(figures["repeats"]) % len(VARIANTS)
            order = VARIANTS[shift:] + VARIANTS[:shift]
            figures["repeats"].append({variant: run_step(side, variant, epochs, clock) for variant in order})
            outcome.figures(f"training side, {name}", figures)
        judge(outcome, name, figures, device)
    finally:
        del worker, side
        release()


def peaks(side: Any, device: str) -> dict[str, int]:
    """Peak bytes of each stage alone."""
    from grail_advantage import GrailConfig

    log_probs = side.old_log_probs()["log_probs"]
    stages: dict[str, Callable[[], Any]] = {
        "old log-probabilities": side.old_log_probs,
        "with GRAIL's backward": lambda: side.fused_log_probs(GrailConfig("official")),
        "actor update": lambda: side.update(log_probs, side.base_advantages()),
    }
    return {name: peak_memory(device, stage) for name, stage in stages.items()}


def ratios(figures: dict[str, Any], variant: str, epochs: int) -> list[float]:
    """A variant's steps of so many epochs as multiples of GRPO's in the same repeat."""
    return [sum(repeat[variant][: epochs + 1]) / sum(repeat[GRPO][: epochs + 1]) for repeat in figures["repeats"]]


def judge(outcome: Outcome, name: str, figures: dict[str, Any], device: str) -> None:
    """GRAIL's step must cost what the account says, and its pass must fit where the update does."""
    found, step = ratios(figures, "GRAIL", 1), f"{name}: GRAIL's step of one epoch against GRPO's"
    detail = f"{median(found):.3f} x, {min(found):.3f} to {max(found):.3f}"
    if device == "cpu":
        outcome.not_run(step, f"{detail}: a rehearsal's times mean nothing")
    else:
        outcome.check(step, median(found) <= STEP_LIMIT, f"{detail} (at most {STEP_LIMIT:.2f})")
    share = figures["peak_bytes"]["with GRAIL's backward"] / figures["peak_bytes"]["actor update"]
    outcome.check(f"{name}: GRAIL's pass needs no more memory than the update", share <= 1, f"{share:.2f} x its peak")


def fused_kernels(outcome: Outcome, device: str) -> None:
    """Scores with verl's fused kernels, torch's and triton's; a GPU may multiply float32 with 10 bits of mantissa (TF32)."""
    from tests.verl_ext.gpu_checks import kernel_errors

    with tempfile.TemporaryDirectory() as folder:
        for name, error in kernel_errors(Path(folder), device).items():
            outcome.check(f"fused kernels of {name}: a plain model's scores", error <= 2e-2, f"off by {error:.1e}")


def seconds_of_work(outcome: Outcome, device: str) -> None:
    """``timing_s/token_weights`` is what the GPU works, not what the host takes to hand it out."""
    if device != "cuda":
        outcome.not_run("seconds of the saliency are the GPU's", "needs a GPU")
        return
    from tests.verl_ext.gpu_checks import seconds_of_work as measure

    handed_out, seconds, until_end = measure()
    outcome.check(
        "seconds of the saliency are the GPU's",
        handed_out < seconds <= until_end,
        f"{seconds:.3f} s, handed out in {handed_out:.3f} s, over after {until_end:.3f} s",
    )
