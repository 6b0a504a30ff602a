"""Part c: the training side of the published recipe on one GPU, with verl's engine, at the shapes of Qwen3-0.6B and Qwen3-4B.

Engine, precision, micro-batches, checkpointing, epochs and loss are those that ``examples/run_qwen3_grail.sh`` gives verl, read
from its configuration. verl's own GRPO, ``uniform`` and GRAIL run in turn on one engine, the latter two with responses of
advantage 0 left out and not. One forward is timed first, and decides how many responses and repeats there are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
ROWS = 8
"""Responses of the batch, or half as many; GRAIL scores three eighths, two eighths have a group without advantage."""
STEP_LIMIT = 2 / 3
"""Most that GRAIL may add to a step of one epoch, as a share of GRPO's step for each share of scored responses: a quarter with
three of eight. By multiplications it is 0.17 to 0.20 then: a backward to activations costs one forward of each linear layer and
2.5 of attention, and with checkpointing a forward more."""
SECONDS, REPEATS = 60, 6
"""Most that a shape takes, and most repeats."""
REPEAT, BESIDE = 27, 23
"""Forwards over the batch: in a repeat of all variants, with checkpointing and one epoch; before and after all repeats."""
UPDATE, GRAIL_PASS = "actor update", "GRAIL's pass"


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part; on the CPU a toy shape and short responses. Where the recipe's micro-batch does not fit, the
    responses go one at a time."""
    prepare_process(device)
    with ThreadPoolExecutor() as pool:
        resolved = pool.submit(recipe)
        import benchmarks.verl_host  # noqa: F401  # takes as long
    config = resolved.result()
    tokens = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    whole = max(1, config["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] // tokens)
    for shape in ("Qwen3-0.6B", "Qwen3-4B") if device == "cuda" else ("toy",):
        for together in (whole, 1):
            with outcome.attempt(f"{shape}, {together} at once"):
                training_side(outcome, config, device, shape, together)
                if device == "cuda":
                    break
            release()
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


def log_probs_in_chunks() -> str:
    """Without flash-attn verl 0.9.1 takes log-probabilities of bfloat16 logits token by token, each with a backward of its own:
    41,000 tokens a pass have no end. Both sides take them in few calls instead, with the same bits. verl's fused kernels would
    do it too, but they fail with FSDP2, which the recipe has. Returns the function's name, for the results."""
    from verl_cpu.patches import log_probabilities_in_few_calls

    log_probabilities_in_few_calls()
    return f"log-probabilities by {log_probabilities_in_few_calls.__module__}.{log_probabilities_in_few_calls.__name__}"


def affordable(seconds: float, forward: float) -> tuple[int, int]:
    """Responses of the batch and repeats for so many seconds, where a forward takes ``forward`` for one response."""
    forwards = seconds / forward
    rows = ROWS if forwards >= ROWS * (BESIDE + REPEAT) else ROWS // 2
    return rows, max(1, min(REPEATS, int((forwards / rows - BESIDE) / REPEAT)))


def training_side(outcome: Outcome, config: dict[str, Any], device: str, shape: str, together: int) -> None:
    """A forward, then steps of all variants in turn, kept after each repeat, and the peaks of their stages. GRAIL's step must
    cost what its multiplications say, and its pass must fit where the update does."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from benchmarks.verl_host import VerlHost, make_worker
    from grail_advantage.verl_ext import exchange
    from grail_advantage.verl_ext.engine_model import EngineModel

    begun, name = time.monotonic(), f"{shape}, {together} at once"
    options, data = OmegaConf.create(config["actor_rollout_ref"]["actor"]), config["data"]
    if together == 1:
        # 4 GB a billion parameters less in the optimiser's step
        options.optim.override_optimizer_config = {"foreach": False}
    actor = omega_conf_to_dataclass(options)
    actor.optim.total_training_steps = 1000  # the trainer sets it
    prompt, response = (data["max_prompt_length"], data["max_response_length"]) if device == "cuda" else (8, 72)
    epochs, tokens = actor.ppo_epochs, prompt + response
    setup = Setup(
        device,
        SHAPES[shape],
        tokens=tokens,
        prompt=prompt,
        micro_batch_rows=together,
        parameter_dtype="bf16",  # of the file that verl loads; the engine's are the recipe's
        compute_dtype="bf16",
    )
    layout = "packed" if setup.packed else f"padded, as flash-attn is not installed; {log_probs_in_chunks()}"
    note = (
        f"{setup.attention}, {layout}. Parameters in {actor.engine.model_dtype}, computing in {actor.engine.dtype}. "
        f"Responses of {tokens} tokens, {together} in a micro-batch, gradient checkpointing."
    )

    sizes, worker = (tokens, prompt, setup.shape["vocab_size"]), make_worker(setup, True, actor)
    host = VerlHost(worker, made_up_rollouts(together, *sizes, together), actor)
    host.forward()
    forward = timer.seconds(device, host.forward) / together
    outcome.figures(f"One forward, {name}", {"verl's old log-probabilities": {"seconds a response": forward}}, note)
    rows, repeats = affordable(SECONDS - (time.monotonic() - begun), forward) if device == "cuda" else (ROWS, 1)
    scored, without = round(3 * rows / 8), rows // 4
    host, steps = VerlHost(worker, made_up_rollouts(rows, *sizes, scored, without), actor), []
    for variant in (GRPO, VARIANTS[-1]):  # a first step also compiles, fills caches and makes the optimiser's state
        run_variant(host, variant, 1)
    for repeat in timer.in_turn(
        {variant: partial(run_variant, host, variant, 1) for variant in VARIANTS}, repeats, warm=False
    ):
        steps.append(repeat)
        of_batch = (
            f"{rows} responses, {scored} scored, {without} without advantage. {epochs} epochs: by the first's seconds."
        )
        table = {variant: seconds_of(steps, variant, epochs) for variant in VARIANTS}
        outcome.figures(f"Training side, {name}", table, f"{note} {of_batch}")
    found, limit = ratios(steps, "GRAIL", GRPO, 1), 1 + STEP_LIMIT * scored / rows
    detail = f"{median(found):.3f} x, {min(found):.3f} to {max(found):.3f} (at most {limit:.3g}; on a CPU times mean nothing)"
    holds = median(found) <= limit if device == "cuda" else None
    outcome.check(f"{name}: GRAIL's step of one epoch against GRPO's", holds, detail)

    grail = Grail("official")
    stages = {
        "old log-probabilities": host.forward,
        GRAIL_PASS: lambda: host.own_pass(grail, host.selected(grail)),
        UPDATE: lambda: host.update(host.base_advantages()),
    }
    peaks = {stage: timer.peak_memory(device, run) for stage, run in stages.items()}
    table = {stage: {"GiB": peak / 2**30, "x the update's": peak / peaks[UPDATE]} for stage, peak in peaks.items()}
    outcome.figures(f"Peak memory, {name}", table, "The optimiser's state is there in every stage.")
    share = peaks[GRAIL_PASS] / peaks[UPDATE]
    outcome.check(f"{name}: GRAIL's pass needs no more memory than the update", share <= 1, f"{share:.2f} x its peak")
    with host.engine.eval_mode():
        model = EngineModel(host.engine, temperature=1.0)
        finding = model.probe(exchange.UPDATE, torch.arange(setup.shape["vocab_size"]), tokens)
    outcome.check(f"{name}: a response is the same beside others", finding.holds, str(finding))


def seconds_of(repeats: list[dict[str, list[float]]], variant: str, epochs: int) -> dict[str, list[float]]:
    """Seconds of a variant's steps of one epoch, and multiples of GRPO's of the same repeat; also with further epochs, each as
    long as the first."""
    longer = [{name: [first, *[update] * epochs] for name, (first, update) in repeat.items()} for repeat in repeats]
    return {
        "1 epoch, seconds": [sum(repeat[variant]) for repeat in repeats],
        "1 epoch, x GRPO": ratios(repeats, variant, GRPO, 1),
        f"{epochs} epochs, x GRPO": ratios(longer, variant, GRPO, epochs),
    }
