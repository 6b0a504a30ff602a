"""What the training side of a step costs: with each method, and where some responses have no advantage.

    python -m benchmarks.bench_training_step methods          # what each registered method adds
    python -m benchmarks.bench_training_step zero_advantage   # GRPO, uniform and GRAIL, leaving such responses out or not
    python -m benchmarks.bench_training_step received         # reading and checking what the tokens receive

A step is: old log-probabilities, the method's pass and weights, epochs of the actor update, all with verl's own worker
(:mod:`benchmarks.training_side`) and default options. A saliency is taken on the forward of the old log-probabilities, as a run
does by default; any other pass is one of its own. GRPO runs every response and has no weights. Responses are left out as
``skip_zero_advantage=auto`` leaves them out: of the update and of the old log-probabilities. All variants run once a repeat,
one after the other, each stage timed.

A method that makes up sequences goes response by response and needs a forward for each of many tokens, so its pass is timed on
``SAMPLE_ROWS`` of its responses and that time multiplied; the result records it. ``--setup cuda`` is one GPU, a model of
Qwen3-4B's shape and 8 x 4096 tokens in bf16. Writes ``results/WHAT-DEVICE.json``; ``python -m benchmarks.report`` makes tables
of the first two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measuring import RESULTS, Clock, in_turn, record, show, write
from benchmarks.setup import SETUPS, Setup, prepare_process
from grail_advantage import Signal
from grail_advantage.methods import method, methods
from grail_advantage.signals.base import SALIENCY, SEQUENCES

if TYPE_CHECKING:
    from benchmarks.training_side import TrainingSide

BASELINE, GRPO, SKIPPING = "uniform", "GRPO", ", skipping"
VARIANTS = (GRPO, "uniform", f"uniform{SKIPPING}", "GRAIL", f"GRAIL{SKIPPING}")
"""``uniform`` gives every token weight 1: GRPO with what every method shares."""
SAMPLE_ROWS = 2
STAGES = ("old_log_probs", "pass", "weights", "update")
SELECTED = 0.35
"""Share of the responses with an advantage that needs scores."""
ZERO_ADVANTAGE = (0.0, 0.25, 0.5, 0.75)
"""Shares of responses without an advantage."""
EPOCHS = (1, 4)


def run_step(
    side: TrainingSide,
    signal: Signal | None,
    clock: Clock,
    epochs: int = 1,
    skipping: bool = False,
    watched: bool = False,
) -> list[float]:
    """Seconds of one step, by stage, each epoch of the update one; without a signal it is GRPO's.

    Raises:
        SystemExit: the pass gives a score that is not finite.
    """
    seconds: list[float] = []

    def timed(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = clock.now()
        result = run(*args, **options)
        seconds.append(clock.now() - start)
        return result

    rows = max(1, side.rollouts.trained) if skipping else None
    of_pass: dict[int, torch.Tensor] = {}
    if signal is not None and signal.uses == SALIENCY:
        output = timed(side.fused_log_probs, signal, rows)
        of_pass = timed(side.fused_scores, signal, output)
    else:
        output = timed(side.old_log_probs, rows)
        if signal is not None and signal.uses:
            of_pass = timed(side.separate_pass, signal, timed_rows(side, signal))
        else:
            seconds.append(0.0)
    if not all(scores_T.isfinite().all() for scores_T in of_pass.values()):
        raise SystemExit(f"{signal.name if signal else GRPO}: the pass gives scores that are not finite")
    weigh = side.base_advantages if signal is None else partial(side.weighted_advantages, signal, output, of_pass)
    advantages_BT = timed(weigh)
    for _ in range(epochs):
        timed(side.update, output["log_probs"], advantages_BT, skipping=skipping, watched=watched)
    return seconds


def timed_rows(side: TrainingSide, signal: Signal) -> list[int]:
    """The selected responses that the pass is timed on."""
    rows = side.selected(signal)
    return rows[:SAMPLE_ROWS] if signal.uses == SEQUENCES else rows


def run_variant(side: TrainingSide, variant: str, clock: Clock, epochs: int) -> list[float]:
    """Seconds of a step of one of :data:`VARIANTS`: of everything before the update, and of each epoch."""
    if variant == GRPO:
        with side.stock():
            seconds = run_step(side, None, clock, epochs)
    else:
        signal = method(variant.removesuffix(SKIPPING).lower()).build({})
        seconds = run_step(side, signal, clock, epochs, skipping=variant.endswith(SKIPPING))
    return [sum(seconds[:3]), *seconds[3:]]


def ratios(repeats: Sequence[Mapping[str, Sequence[float]]], variant: str, baseline: str, epochs: int) -> list[float]:
    """A variant's steps of so many epochs as multiples of the baseline's of the same repeat."""
    return [sum(of[variant][: epochs + 1]) / sum(of[baseline][: epochs + 1]) for of in repeats]


def compared(timings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cost of each method in forwards over the batch, and its step against the baseline's.

    Args:
        timings: for each method ``uses``, ``rows``, ``timed_rows`` and ``repeats``, which are seconds by stage.

    Returns:
        For each method ``forwards``; ``ratio`` of steps that are put together from the stages' medians, with one figure for the
        old log-probabilities and for the update, which are the same work in every step; and ``ratios`` of whole steps of the
        same repeat.
    """
    stages = [(of["uses"], seconds) for of in timings.values() for seconds in of["repeats"]]
    forward = median(seconds["old_log_probs"] for uses, seconds in stages if uses != SALIENCY)
    update = median(seconds["update"] for _, seconds in stages)

    def scale(name: str) -> float:
        return timings[name]["rows"] / timings[name]["timed_rows"] if timings[name]["timed_rows"] else 1.0

    def added(name: str) -> float:
        middle = {stage: median(seconds[stage] for seconds in timings[name]["repeats"]) for stage in STAGES}
        more = middle["old_log_probs"] - forward if timings[name]["uses"] == SALIENCY else 0.0
        return more + scale(name) * middle["pass"] + middle["weights"]

    def totals(name: str) -> list[float]:
        return [sum(seconds.values()) + (scale(name) - 1) * seconds["pass"] for seconds in timings[name]["repeats"]]

    return {
        name: {
            "forwards": added(name) / forward,
            "ratio": (forward + added(name) + update) / (forward + added(BASELINE) + update),
            "ratios": [own / base for own, base in zip(totals(name), totals(BASELINE), strict=True)],
        }
        for name in timings
    }


def sides(setup: Setup, checkpointing: bool, zero_advantage: Sequence[float]) -> Iterator[TrainingSide]:
    """The training side with each of these shares of responses without an advantage, on one worker."""
    from benchmarks.random_model import release
    from benchmarks.rollouts import MadeUpRollouts
    from benchmarks.training_side import TrainingSide, make_worker

    worker, vocabulary = make_worker(setup, checkpointing), setup.shape["vocab_size"]
    for share in zero_advantage:
        without = round(share * setup.rows)
        selected = max(1, round(SELECTED * (setup.rows - without)))
        yield TrainingSide(
            worker, MadeUpRollouts(setup.rows, setup.prompt, setup.response, selected, vocabulary, without)
        )
    del worker
    release()


def of_methods(setup: Setup, clock: Clock, repeats: int) -> dict[str, Any]:
    """The record of ``methods``."""
    side = next(sides(setup, False, [0.0]))
    agrees, found = side.agreement()
    if not agrees:
        raise SystemExit(f"the saliencies of the shared forward and of a pass of its own differ: {found}")
    timings: dict[str, dict[str, Any]] = {}
    ways = {}
    for name in methods():
        signal = method(name).build({})
        signal.check_tokenizer(side.tokenizer)
        rows, timed = len(side.selected(signal)), len(timed_rows(side, signal)) if signal.uses else 0
        timings[name] = {"uses": signal.uses, "rows": rows, "timed_rows": timed, "repeats": []}
        ways[name] = partial(run_step, side, signal, clock)
    for repeat in islice(in_turn(ways), repeats):
        for name, seconds in repeat.items():
            timings[name]["repeats"].append(dict(zip(STAGES, seconds, strict=True)))
        show("one repeat done")
    comparison = compared(timings)
    return {
        "setup": {**setup.described(), "wrong_rows": side.rollouts.selected, "prompts": len(set(side.rollouts.groups))},
        "checkpointing": "off",
        "baseline": BASELINE,
        "methods": {name: {**of_method, **comparison[name]} for name, of_method in timings.items()},
    }


def of_zero_advantage(setup: Setup, clock: Clock, repeats: int) -> dict[str, Any]:
    """The record of ``zero_advantage``."""
    runs = []
    for checkpointing in ("off", "on"):
        for side in sides(setup, checkpointing == "on", ZERO_ADVANTAGE):
            zero_advantage, selected = side.rollouts.zero_advantage, side.rollouts.selected
            ways = {variant: partial(run_variant, side, variant, clock, max(EPOCHS)) for variant in VARIANTS}
            run = {"checkpointing": checkpointing, "zero_advantage_rows": zero_advantage, "selected_rows": selected}
            run["repeats"] = list(islice(in_turn(ways), repeats))
            runs.append(run)
            for variant in VARIANTS[1:]:
                found = median(ratios(run["repeats"], variant, GRPO, 1))
                show(
                    f"checkpointing {checkpointing}, {zero_advantage} zero-advantage responses: {variant} {found:.3f} x GRPO"
                )
            del side, ways
    return {"setup": setup.described(), "epochs": sorted(EPOCHS), "runs": runs}


def of_received(setup: Setup, clock: Clock, repeats: int) -> dict[str, Any]:
    """The record of ``received``: whole steps of uniform with and without."""
    side = next(sides(setup, False, [0.0]))
    signal = method("uniform").build({})
    ways = {
        name: partial(run_step, side, signal, clock, watched=watched)
        for name, watched in (("without", False), ("with", True))
    }
    repeated = list(islice(in_turn(ways), repeats))
    found = [sum(of["with"]) / sum(of["without"]) for of in repeated]
    show(f"a step that is read: {median(found):.4f} x one that is not, from {min(found):.4f} to {max(found):.4f}")
    return {"setup": setup.described(), "ratios": found, "repeats": repeated}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"methods": of_methods, "zero_advantage": of_zero_advantage, "received": of_received}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--setup", choices=SETUPS, default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    setup = SETUPS[args.setup]()
    prepare_process(setup.device)
    clock = Clock(setup.device)
    option = "" if args.setup == "cpu" else f" --setup {args.setup}"
    result = record(args.what, clock, f"python -m benchmarks.bench_training_step {args.what}{option}")
    write(result | kinds[args.what](setup, clock, args.repeats), args.results)


if __name__ == "__main__":
    main()
