"""What the training side of a step costs: with each method, and where some responses have no advantage.

    python -m benchmarks.bench_training_step methods          # what each registered method adds
    python -m benchmarks.bench_training_step zero_advantage   # GRPO, uniform and GRAIL, leaving such responses out or not

A step is: old log-probabilities, the method's pass and weights, epochs of the actor update, all with verl's own worker
(:mod:`benchmarks.verl_host`) and default options. GRPO runs every response and has no weights. Responses are left out as
``skip_zero_advantage=auto`` leaves them out: of the update.

``--setup cuda`` is one GPU, a model of Qwen3-4B's shape and 8 x 4096 tokens in bf16. Writes ``results/WHAT-DEVICE.json``;
``python -m benchmarks.report`` makes tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import timer
from benchmarks.made_up import made_up_rollouts, release
from benchmarks.setup import SETUPS, Setup, prepare_process
from grail_advantage import Method
from grail_advantage.method import build, methods
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from benchmarks.verl_host import VerlHost

BASELINE, GRPO, SKIPPING = "uniform", "GRPO", ", skipping"
VARIANTS = (GRPO, "uniform", f"uniform{SKIPPING}", "GRAIL", f"GRAIL{SKIPPING}")
"""``uniform`` gives every token weight 1: GRPO with what every method shares."""
STAGES = ("old_log_probs", "pass", "weights", "update")
SELECTED = 0.35
"""Share of the responses with an advantage that needs scores."""
ZERO_ADVANTAGE = (0.0, 0.25, 0.5, 0.75)
"""Shares of responses without an advantage."""
EPOCHS = (1, 4)


def run_step(host: VerlHost, signal: Method | None, epochs: int = 1, skipping: bool = False) -> list[float]:
    """Seconds of one step by stage, each epoch of the update one; without a signal it is GRPO's."""
    timed = partial(timer.seconds, host.device)
    forward = timed(host.forward)
    made, host.pass_seconds = [], 0.0
    weights = timed(lambda: made.append(weigh(host, signal, None).advantages if signal else host.base_advantages()))
    updates = [timed(partial(host.update, *made, skipping=skipping)) for _ in range(epochs)]
    return [forward, host.pass_seconds, weights - host.pass_seconds, *updates]


def run_variant(host: VerlHost, variant: str, epochs: int) -> list[float]:
    """Seconds of a step of one of :data:`VARIANTS`: of everything before the update, and of each epoch."""
    if variant == GRPO:
        with host.stock():
            seconds = run_step(host, None, epochs)
    else:
        signal = build(variant.removesuffix(SKIPPING).lower())
        seconds = run_step(host, signal, epochs, skipping=variant.endswith(SKIPPING))
    return [sum(seconds[:3]), *seconds[3:]]


def ratios(repeats: list[dict[str, list[float]]], variant: str, baseline: str, epochs: int) -> list[float]:
    """A variant's steps of so many epochs as multiples of the baseline's."""
    return timer.ratios(repeats, variant, baseline, lambda seconds: sum(seconds[: epochs + 1]))


def compared(timings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cost of each method in forwards over the batch, and its step against the baseline's.

    Args:
        timings: for each method ``uses``, ``rows``, ``timed_rows`` and ``repeats``, which are seconds by stage.

    Returns:
        For each method ``forwards``; ``ratio`` of steps that are put together from the stages' medians, with one figure for the
        old log-probabilities and for the update, which are the same work in every step; and ``ratios`` of whole steps of the
        same repeat.
    """
    stages = [seconds for of in timings.values() for seconds in of["repeats"]]
    forward, update = (median(seconds[name] for seconds in stages) for name in ("old_log_probs", "update"))
    added, totals = {}, {}
    for name, of in timings.items():
        scale = of["rows"] / of["timed_rows"] if of["timed_rows"] else 1.0
        middle = {stage: median(seconds[stage] for seconds in of["repeats"]) for stage in STAGES}
        added[name] = scale * middle["pass"] + middle["weights"]
        totals[name] = [sum(seconds.values()) + (scale - 1) * seconds["pass"] for seconds in of["repeats"]]
    return {
        name: {
            "forwards": added[name] / forward,
            "ratio": (forward + added[name] + update) / (forward + added[BASELINE] + update),
            "ratios": [own / base for own, base in zip(totals[name], totals[BASELINE], strict=True)],
        }
        for name in timings
    }


def hosts(setup: Setup, checkpointing: bool, zero_advantage: tuple[float, ...]) -> Iterator[tuple[VerlHost, int, int]]:
    """One worker with a batch for each of these shares of responses without an advantage; how many these are, and how many
    responses are scored."""
    from benchmarks.verl_host import VerlHost, make_worker

    worker = make_worker(setup, checkpointing)
    for share in zero_advantage:
        without = round(share * setup.rows)
        scored = max(1, round(SELECTED * (setup.rows - without)))
        sizes = setup.rows, setup.tokens, setup.prompt, setup.shape["vocab_size"]
        yield VerlHost(worker, made_up_rollouts(*sizes, scored, without)), without, scored
    del worker
    release()


def of_methods(setup: Setup, repeats: int) -> dict[str, Any]:
    """The record of ``methods``."""
    from benchmarks.verl_host import timed_rows

    host, _, scored = next(hosts(setup, False, (0.0,)))
    timings: dict[str, dict[str, Any]] = {}
    variants = {}
    for name in methods():
        signal = build(name)
        rows = host.selected(signal)
        timed = len(timed_rows(signal, rows)) if signal.uses else 0
        timings[name] = {"uses": signal.uses, "rows": len(rows), "timed_rows": timed, "repeats": []}
        variants[name] = partial(run_step, host, signal)
    for repeat in timer.in_turn(variants, repeats):
        for name, seconds in repeat.items():
            timings[name]["repeats"].append(dict(zip(STAGES, seconds, strict=True)))
    comparison, prompts = compared(timings), len(host.rollouts().groups.unique())
    return {
        "setup": {**setup.described(), "wrong_rows": scored, "prompts": prompts},
        "checkpointing": "off",
        "baseline": BASELINE,
        "methods": {name: {**of_method, **comparison[name]} for name, of_method in timings.items()},
    }


def of_zero_advantage(setup: Setup, repeats: int) -> dict[str, Any]:
    """The record of ``zero_advantage``."""
    runs = []
    for checkpointing in ("off", "on"):
        for host, without, scored in hosts(setup, checkpointing == "on", ZERO_ADVANTAGE):
            variants = {variant: partial(run_variant, host, variant, max(EPOCHS)) for variant in VARIANTS}
            run = {"checkpointing": checkpointing, "zero_advantage_rows": without, "selected_rows": scored}
            run["repeats"] = list(timer.in_turn(variants, repeats))
            runs.append(run)
            for variant in VARIANTS[1:]:
                found = median(ratios(run["repeats"], variant, GRPO, 1))
                timer.show(
                    f"checkpointing {checkpointing}, {without} zero-advantage responses: {variant} {found:.3f} x GRPO"
                )
    return {"setup": setup.described(), "epochs": sorted(EPOCHS), "runs": runs}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"methods": of_methods, "zero_advantage": of_zero_advantage}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--setup", choices=SETUPS, default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=timer.RESULTS, help="folder to write to")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    prepare_process(setup.device)
    option = "" if args.setup == "cpu" else f" --setup {args.setup}"
    result = timer.record(args.what, setup.device, f"python -m benchmarks.bench_training_step {args.what}{option}")
    timer.write(result | kinds[args.what](setup, args.repeats), args.results)


if __name__ == "__main__":
    main()
