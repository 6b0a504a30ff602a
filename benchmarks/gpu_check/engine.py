"""Part b: verl's engine on one GPU: the training side of a step (``bench_training_step.py``), and tests that need a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from measuring import median

from gpu_check.outcome import Outcome
from gpu_check.parts import last_line, run_command
from gpu_check.plain import FULL
from gpu_check.pytest_checks import run_tests

CHECKPOINTING = "on"
"""As the launch scripts train."""
MEASURED = ("--epochs", "1", "--repeats", "2", "--gradient-checkpointing", CHECKPOINTING)
STEP_LIMIT = 1.18
"""Most that a GRAIL step of one epoch should cost, in GRPO steps: 35 % of the rows at 2 F of the account's 5 F is 1.14."""
SMALL_GPU = 60 * 2**30
"""Bytes of memory below which a model of Qwen3-0.6B's shape takes the place of Qwen3-4B's."""
TESTS = ("tests/verl_ext/test_layouts_gpu.py",)
STAGES = ("old_log_probs", "saliency", "weights", "update")


def run(outcome: Outcome, device: str = "cuda", options: Sequence[str] | None = None) -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` in tests.
        options: of the benchmark, in place of those for this GPU.
    """
    with outcome.attempt("training side of a step"):
        training_side(outcome, device, shape_options() if options is None else options)
    with outcome.attempt("tests that need a GPU"):
        run_tests(outcome, TESTS)


def shape_options() -> list[str]:
    """Options of the benchmark where the GPU is too small for its own shape."""
    if torch.cuda.get_device_properties(0).total_memory >= SMALL_GPU:
        return []
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "heads": "num_attention_heads",
        "kv-heads": "num_key_value_heads",
        "head-dim": "head_dim",
    }
    shape = FULL.shapes["Qwen3-0.6B"]
    return [word for option, name in names.items() for word in (f"--{option}", str(shape[name]))]


def training_side(outcome: Outcome, device: str, options: Sequence[str]) -> None:
    """Run the benchmark, and judge the cost of GRAIL's pass on the shared forward."""
    folder = outcome.path.parent
    path = folder / f"training_step-{device}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "benchmarks/bench_training_step.py", "--device", device, *MEASURED, *options]
    code, output = run_command([*command, "--results", str(folder)])
    if code != 0 or not path.exists():
        outcome.check("training side of a step: the benchmark runs", False, last_line(output))
        return
    outcome.check("training side of a step: the benchmark runs", True, "saliencies of its three ways agree")
    table = summary(json.loads(path.read_text(encoding="utf-8")))
    outcome.figures("training side", table)
    fused = table["variants"]["GRAIL official, fused"]
    outcome.check(
        "GRAIL's step against GRPO's",
        fused["ratio"] <= STEP_LIMIT,
        f"{fused['ratio']:.3f} x, {min(fused['ratios']):.3f} to {max(fused['ratios']):.3f} (at most {STEP_LIMIT:.2f})",
    )
    peaks = table["peak_bytes"]
    share = peaks["fused pass, official"] / peaks["actor update"]
    outcome.check(
        "GRAIL's pass needs no more memory than the update", share <= 1, f"{share:.2f} x its peak (at most 1)"
    )


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Of a result of ``bench_training_step.py`` with one epoch: seconds of each variant's step, as multiples of GRPO's in the
    same repeat, and peak memory of the stages."""
    (run,) = result["runs"]
    totals = [
        {variant: sum(sum(stages[stage]) for stage in STAGES) for variant, stages in repeat.items()}
        for repeat in run["repeats"]
    ]
    variants = {}
    for variant in totals[0]:
        ratios = [repeat[variant] / repeat["GRPO"] for repeat in totals]
        variants[variant] = {
            "seconds": median([repeat[variant] for repeat in totals]),
            "ratio": median(ratios),
            "ratios": ratios,
        }
    return {"setup": result["setup"], "variants": variants, "peak_bytes": run["peak_bytes"]}
