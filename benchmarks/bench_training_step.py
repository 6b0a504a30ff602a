"""Cost and peak memory of the training side of a step: GRPO, GRAIL, and GRAIL as the published procedure computes it.

    python benchmarks/bench_training_step.py                  # CPU, one thread
    python benchmarks/bench_training_step.py --device cuda    # one GPU, a model of Qwen3-4B's shape, 8 x 4096 tokens, bf16

A step is: old log-probabilities, saliency and weights, then epochs of the actor update, all with verl's own worker
(``training_side.py``). All variants run once a repeat, one after the other, each stage timed; a step of fewer epochs is the
beginning of the longest one. Writes ``results/training_step-<device>.json``; ``report.py`` makes the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environment import add_options, described, set_up
from measuring import RESULTS, Clock, peak_memory, record, selected_rows, show, write

from grail_advantage import GrailConfig

if TYPE_CHECKING:
    from training_side import TrainingSide

VARIANTS = (
    "GRPO",
    "GRAIL official, fused",
    "GRAIL robust, fused",
    "GRAIL official, separate",
    "GRAIL robust, separate",
    "published procedure",
)
Stages = dict[str, list[float]]
"""Seconds by stage; one entry an epoch in the stages that every epoch repeats."""


def run_step(side: TrainingSide, variant: str, epochs: int, clock: Clock) -> Stages:
    """One step of a variant."""
    stages: Stages = {"old_log_probs": [], "saliency": [], "weights": [], "update": []}
    config = GrailConfig("robust" if "robust" in variant else "official")

    def timed(stage: str, run: Callable[..., Any], *args: Any) -> Any:
        start = clock.now()
        result = run(*args)
        stages[stage].append(clock.now() - start)
        return result

    if variant.endswith("fused"):
        output = timed("old_log_probs", side.fused_log_probs, config)
        scores = timed("weights", side.fused_scores, config, output)
    else:
        output = timed("old_log_probs", side.old_log_probs)
        scores = timed("saliency", side.separate_pass, config) if variant.endswith("separate") else None
    advantages_BT = side.base_advantages()
    if scores is not None:
        advantages_BT = timed("weights", side.weighted_advantages, config, output, scores)
        stages["weights"] = [sum(stages["weights"])]
    for _ in range(epochs):
        if variant == "published procedure":
            scores = timed("saliency", side.published_pass)
            advantages_BT = timed("weights", side.weighted_advantages, config, output, scores)
        timed("update", side.update, output["log_probs"], advantages_BT)
    return stages


def peaks(side: TrainingSide, device: str) -> dict[str, int]:
    """Peak bytes of each stage alone."""
    official, robust = GrailConfig("official"), GrailConfig("robust")
    log_probs = side.old_log_probs()["log_probs"]
    runs = {
        "nothing": lambda: None,
        "old log-probabilities": side.old_log_probs,
        "fused pass, official": lambda: side.fused_log_probs(official),
        "fused pass, robust": lambda: side.fused_log_probs(robust),
        "separate pass, official": lambda: side.separate_pass(official),
        "separate pass, robust": lambda: side.separate_pass(robust),
        "published pass": side.published_pass,
        "actor update": lambda: side.update(log_probs, side.base_advantages()),
    }
    return {name: peak_memory(device, run) for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[1, 4], help="epochs over the batch to give totals for"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--gradient-checkpointing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    set_up(args)

    from training_side import Rollouts, TrainingSide, make_worker, release

    clock = Clock(args.device, args.threads)
    result = record("training_step", args.device, clock, args.threads)
    selected = selected_rows(args.selected, args.rows)
    result |= {"setup": {**described(args), "selected_rows": selected}, "epochs": sorted(args.epochs), "runs": []}
    for checkpointing in args.gradient_checkpointing:
        worker = make_worker(args, checkpointing == "on")
        rollouts = Rollouts(args.rows, args.prompt, args.tokens - args.prompt, selected, args.vocabulary)
        side = TrainingSide(worker, rollouts)
        side.check()
        for variant in args.variants:
            run_step(side, variant, 1, clock)
        memory = peaks(side, args.device)
        repeats = []
        for repeat in range(args.repeats):
            shift = repeat % len(args.variants)
            order = args.variants[shift:] + args.variants[:shift]
            repeats.append({variant: run_step(side, variant, max(args.epochs), clock) for variant in order})
            show(f"gradient checkpointing {checkpointing}: repeat {repeat + 1} of {args.repeats}")
        result["runs"].append({"checkpointing": checkpointing, "repeats": repeats, "peak_bytes": memory})
        del worker, side
        release()
    write(result, args.results)


if __name__ == "__main__":
    main()
