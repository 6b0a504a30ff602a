"""Processor time of the training side of a step where some rows have no advantage: with and without leaving them out.

    python benchmarks/bench_neutral_rows.py                  # CPU, one thread
    python benchmarks/bench_neutral_rows.py --device cuda    # one GPU, a model of Qwen3-4B's shape, 8 x 4096 tokens, bf16

A step is: old log-probabilities with GRAIL's saliency, weights, and epochs of the actor update, all with verl's own worker
(``training_side.py``). GRPO is verl's own, which runs every row. Rows are left out as ``skip_neutral_rows=auto`` leaves them
out: of the update, and of the old log-probabilities. All variants run once a repeat, one after the other. Writes
``results/neutral_rows-<device>.json`` and prints each variant's steps as multiples of GRPO's of the same repeat: the median,
and lowest to highest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from environment import add_options, described, set_up
from measuring import RESULTS, Clock, median, record, selected_rows, show, write

from grail_advantage import GrailConfig
from grail_advantage.methods import method

if TYPE_CHECKING:
    from training_side import TrainingSide

GRPO = "GRPO"
VARIANTS = (GRPO, "uniform", "uniform, skipping", "GRAIL", "GRAIL, skipping")
"""Without an addition every row runs. ``uniform`` weighs every token 1: GRPO with what every method shares."""


def run_step(side: TrainingSide, variant: str, epochs: int, clock: Clock) -> list[float]:
    """Seconds of a step: of everything before the update, and of each epoch."""
    skipping = variant.endswith("skipping")
    rows = max(1, side.rollouts.trained) if skipping else None
    start = clock.now()
    advantages_BT = side.base_advantages()
    if variant.startswith("GRAIL"):
        config = GrailConfig("official")
        output = side.fused_log_probs(config, rows)
        advantages_BT = side.weighted_advantages(config, output, side.fused_scores(config, output))
    else:
        output = side.old_log_probs(rows)
        if variant != GRPO:
            advantages_BT = side.weighted_advantages(method("uniform").build({}), output, {})
    seconds = [clock.now() - start]
    for _ in range(epochs):
        start = clock.now()
        side.update(output["log_probs"], advantages_BT, skipping=skipping)
        seconds.append(clock.now() - start)
    return seconds


def compare(repeats: list[dict[str, list[float]]], variant: str, epochs: int) -> str:
    """A variant's steps of so many epochs as multiples of GRPO's."""
    ratios = [sum(steps[variant][: epochs + 1]) / sum(steps[GRPO][: epochs + 1]) for steps in repeats]
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--neutral", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75], help="shares of rows")
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[1, 4], help="epochs over the batch to give totals for"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gradient-checkpointing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    set_up(args)

    from training_side import Rollouts, TrainingSide, make_worker, release

    clock = Clock(args.device, args.threads)
    result = record("neutral_rows", args.device, clock, args.threads)
    result |= {"setup": described(args), "epochs": sorted(args.epochs), "runs": []}
    for checkpointing in args.gradient_checkpointing:
        worker = make_worker(args, checkpointing == "on")
        for share in args.neutral:
            neutral = round(share * args.rows)
            selected = selected_rows(args.selected, args.rows - neutral)
            response = args.tokens - args.prompt
            rollouts = Rollouts(args.rows, args.prompt, response, selected, args.vocabulary, neutral)
            side = TrainingSide(worker, rollouts)
            for variant in VARIANTS:
                run_step(side, variant, 1, clock)
            repeats = []
            for repeat in range(args.repeats):
                shift = repeat % len(VARIANTS)
                order = VARIANTS[shift:] + VARIANTS[:shift]
                repeats.append({variant: run_step(side, variant, max(args.epochs), clock) for variant in order})
            run = {
                "checkpointing": checkpointing,
                "neutral_rows": neutral,
                "selected_rows": selected,
                "repeats": repeats,
            }
            result["runs"].append(run)
            for epochs in sorted(args.epochs):
                for variant in VARIANTS[1:]:
                    times = compare(repeats, variant, epochs)
                    show(
                        f"checkpointing {checkpointing}, {neutral} of {args.rows} rows, {epochs} epochs: {variant} {times}"
                    )
        del worker, side
        release()
    write(result, args.results)


if __name__ == "__main__":
    main()
