"""Cost that each registered method adds to the training side of a step.

    python benchmarks/bench_methods.py                  # CPU, one thread
    python benchmarks/bench_methods.py --device cuda    # one GPU, a model of Qwen3-4B's shape, 8 x 4096 tokens, bf16

A step is: old log-probabilities, the method's pass and weights, one epoch of the actor update, all with verl's own worker
(``training_side.py``) and the method's default options. A saliency is taken on the forward of the old log-probabilities, as a
run does by default; any other pass is one of its own. All methods run once a repeat, one after the other, each stage timed.

A method that makes up sequences goes row by row and needs a forward for each of many tokens, so its pass is timed on
``SAMPLE_ROWS`` of its rows and that time multiplied; the result records it. Writes ``results/methods-<device>.json``, from
which ``report.py`` makes a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from environment import add_options, described, set_up
from measuring import RESULTS, Clock, median, record, selected_rows, show, write

from grail_advantage import Signal
from grail_advantage.methods import method, methods
from grail_advantage.signals.base import SALIENCY, SEQUENCES

if TYPE_CHECKING:
    from training_side import TrainingSide

BASELINE = "uniform"
SAMPLE_ROWS = 2
STAGES = ("old_log_probs", "pass", "weights", "update")


def run_step(side: TrainingSide, signal: Signal, clock: Clock, check: bool = False) -> dict[str, float]:
    """One step: seconds by stage.

    Raises:
        SystemExit: with ``check``, where the pass gives a score that is not finite.
    """
    stages = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, run: Callable[..., Any], *args: Any) -> Any:
        start = clock.now()
        result = run(*args)
        stages[stage] += clock.now() - start
        return result

    of_pass: dict[int, torch.Tensor] = {}
    if signal.uses == SALIENCY:
        output = timed("old_log_probs", side.fused_log_probs, signal)
        of_pass = timed("pass", side.fused_scores, signal, output)
    else:
        output = timed("old_log_probs", side.old_log_probs)
        if signal.uses:
            of_pass = timed("pass", side.separate_pass, signal, timed_rows(side, signal))
    if check and not all(scores_T.isfinite().all() for scores_T in of_pass.values()):
        raise SystemExit(f"{signal.name}: the pass gives scores that are not finite")
    advantages_BT = timed("weights", side.weighted_advantages, signal, output, of_pass)
    timed("update", side.update, output["log_probs"], advantages_BT)
    return stages


def timed_rows(side: TrainingSide, signal: Signal) -> list[int]:
    """The selected rows that the pass is timed on."""
    rows = side.selected(signal)
    return rows[:SAMPLE_ROWS] if signal.uses == SEQUENCES else rows


def compared(timings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cost of each method in forwards over the batch, and its step against the baseline's.

    Args:
        timings: for each method ``uses``, ``rows``, ``timed_rows`` and ``repeats``, which are seconds by stage.

    Returns:
        For each method ``forwards``; ``ratio`` of steps that are put together from the stages' medians, with one figure for the
        old log-probabilities and for the update, which are the same work in every step; and ``ratios`` of whole steps of the
        same repeat.
    """
    updates = [stages["update"] for of_method in timings.values() for stages in of_method["repeats"]]
    forwards = [
        stages["old_log_probs"]
        for of_method in timings.values()
        if of_method["uses"] != SALIENCY
        for stages in of_method["repeats"]
    ]
    forward, update = median(forwards), median(updates)

    def scale(name: str) -> float:
        return timings[name]["rows"] / timings[name]["timed_rows"] if timings[name]["timed_rows"] else 1.0

    def added(name: str) -> float:
        repeats = timings[name]["repeats"]
        middle = {stage: median([stages[stage] for stages in repeats]) for stage in STAGES}
        more = middle["old_log_probs"] - forward if timings[name]["uses"] == SALIENCY else 0.0
        return more + scale(name) * middle["pass"] + middle["weights"]

    def totals(name: str) -> list[float]:
        return [
            stages["old_log_probs"] + scale(name) * stages["pass"] + stages["weights"] + stages["update"]
            for stages in timings[name]["repeats"]
        ]

    return {
        name: {
            "forwards": added(name) / forward,
            "ratio": (forward + added(name) + update) / (forward + added(BASELINE) + update),
            "ratios": [own / base for own, base in zip(totals(name), totals(BASELINE), strict=True)],
        }
        for name in timings
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--methods", nargs="+", choices=list(methods()), default=list(methods()), metavar="METHOD")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", choices=("off", "on"), default="off")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    set_up(args)

    from training_side import Rollouts, TrainingSide, make_worker, word_tokenizer

    clock = Clock(args.device, args.threads)
    result = record("methods", args.device, clock, args.threads)
    selected = selected_rows(args.selected, args.rows)
    worker = make_worker(args, args.gradient_checkpointing == "on")
    rollouts = Rollouts(args.rows, args.prompt, args.tokens - args.prompt, selected, args.vocabulary)
    side = TrainingSide(worker, rollouts)
    side.check()
    signals = {name: method(name).build({}) for name in sorted({BASELINE, *args.methods})}
    timings: dict[str, dict[str, Any]] = {}
    for name, signal in signals.items():
        signal.check_tokenizer(word_tokenizer())
        rows = side.selected(signal)
        timed = len(timed_rows(side, signal)) if signal.uses else 0
        timings[name] = {"uses": signal.uses, "rows": len(rows), "timed_rows": timed, "repeats": []}
        run_step(side, signal, clock, check=True)
        show(f"{name}: warm")
    names = list(signals)
    for repeat in range(args.repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            timings[name]["repeats"].append(run_step(side, signals[name], clock))
        show(f"repeat {repeat + 1} of {args.repeats}")
    comparison = compared(timings)
    result |= {
        "setup": {**described(args), "wrong_rows": selected, "prompts": len(set(rollouts.groups))},
        "checkpointing": args.gradient_checkpointing,
        "baseline": BASELINE,
        "methods": {name: {**of_method, **comparison[name]} for name, of_method in timings.items()},
    }
    write(result, args.results)


if __name__ == "__main__":
    main()
