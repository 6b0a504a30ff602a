"""What the training side of a step costs: with each method, where some responses have no advantage, and in memory.

    python -m benchmarks.bench_training_step methods          # what each registered method adds
    python -m benchmarks.bench_training_step zero_advantage   # GRPO, uniform and GRAIL, with and without the shortcuts
    python -m benchmarks.bench_training_step stages           # peak memory

A step is: old log-probabilities, the method's pass and weights, an epoch of the actor update, with verl's own worker and
default options. GRPO runs every response and has no weights. Responses are left out of the update as
``skip_zero_advantage=auto`` does it, and old log-probabilities are its own as with ``reuse_log_probs=auto``. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import timer
from benchmarks.setup import SETUPS, Setup, prepare_process
from grail_advantage.method import build, methods

if TYPE_CHECKING:
    from benchmarks.verl_host import VerlHost

BASELINE = "uniform"
GRPO = "GRPO"
ONE_EPOCH = "1 epoch, x GRPO"
EPOCHS = 4
SELECTED = 0.35
"""Share of the responses with an advantage that needs scores."""
ZERO_ADVANTAGE = (0.0, 0.25, 0.5, 0.75)
"""Shares of responses without an advantage."""
UNMEASURED = ("fitted", "progress_advantage")  # they need a fit to values, and a reference model


class Variant(NamedTuple):
    """How a step is run."""

    method: str | None = None  # without one it is GRPO's
    skips: bool = False  # leaves out responses without an advantage
    reuses: bool = False  # takes old log-probabilities from the update's own forward


VARIANTS = {
    GRPO: Variant(),
    "uniform": Variant("uniform"),  # gives every token weight 1: GRPO with what all methods share
    "uniform, skipping": Variant("uniform", skips=True),
    "uniform, skipping, own forward": Variant("uniform", skips=True, reuses=True),
    "GRAIL": Variant("grail"),
    "GRAIL, skipping": Variant("grail", skips=True),
    "GRAIL, own forward": Variant("grail", reuses=True),
    "GRAIL, skipping, own forward": Variant("grail", skips=True, reuses=True),
}


class Seconds(NamedTuple):
    """Seconds of a step with one epoch, by stage."""

    forward: float  # the old log-probabilities
    scores: float  # the method's pass
    weights: float
    update: float

    def with_epochs(self, epochs: int) -> float:
        """The whole step's, whose further epochs are as long as the first."""
        return sum(self) + (epochs - 1) * self.update


def run_step(host: VerlHost, variant: Variant) -> Seconds:
    """Run a step of a variant."""
    seconds = partial(timer.seconds, host.device)
    forward = 0.0 if variant.reuses else seconds(host.forward)
    host.pass_seconds = 0.0
    advantages_BT = host.base_advantages()
    weights = 0.0
    if variant.method is not None:
        start = timer.now(host.device)
        advantages_BT = host.weigh(build(variant.method)).advantages
        # weigh() runs the pass, too, whose seconds are a stage of their own.
        weights = timer.now(host.device) - start - host.pass_seconds
    update = seconds(
        lambda: host.update(advantages_BT, skipping=variant.skips, reusing=variant.reuses)
    )
    return Seconds(forward, host.pass_seconds, weights, update)


def run_variants(host: VerlHost, repeats: int, epochs: int) -> dict[str, dict[str, list[float]]]:
    """Steps of all variants in turn: their seconds, and multiples of GRPO's of the same repeat."""
    steps = timer.in_turn(
        {name: partial(run_step, host, variant) for name, variant in VARIANTS.items()}, repeats
    )
    figures = {}
    for name in VARIANTS:
        figures[name] = {"1 epoch, seconds": [sum(repeat[name]) for repeat in steps]}
        for count, column in ((1, ONE_EPOCH), (epochs, f"{epochs} epochs, x GRPO")):
            ratios = [
                repeat[name].with_epochs(count) / repeat[GRPO].with_epochs(count)
                for repeat in steps
            ]
            figures[name][column] = ratios
    return figures


def stage_peaks(host: VerlHost) -> dict[str, dict[str, float]]:
    """The peak of memory of each stage of a step that runs every response, once the optimiser has its state."""
    grail = build("grail")
    advantages_BT = host.base_advantages()
    stages = {
        "old log-probabilities": host.forward,
        "GRAIL's pass": lambda: host.scores(grail, host.selected(grail)),
        "actor update": lambda: host.update(advantages_BT),
        "actor update, own forward": lambda: host.update(advantages_BT, reusing=True),
    }
    return {
        stage: {"GiB": timer.peak_memory(host.device, run) / 2**30} for stage, run in stages.items()
    }


def compared(repeats: Mapping[str, Sequence[Seconds]]) -> dict[str, dict[str, Any]]:
    """For each method the ``forwards`` over the batch that it adds, in each repeat, and the ``ratio`` of its step to the
    baseline's, put together from medians: the old log-probabilities and the update are the same work in every step."""
    every_step = [step for steps in repeats.values() for step in steps]
    forward = median(step.forward for step in every_step)
    update = median(step.update for step in every_step)
    added = {
        name: [step.scores + step.weights for step in steps] for name, steps in repeats.items()
    }
    step_seconds = {name: forward + median(seconds) + update for name, seconds in added.items()}
    return {
        name: {
            "forwards": [value / forward for value in seconds],
            "ratio": step_seconds[name] / step_seconds[BASELINE],
        }
        for name, seconds in added.items()
    }


def of_methods(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``methods``; ``rows`` is how many responses are scored."""
    from benchmarks.verl_host import VerlHost

    host = VerlHost(worker, setup.rollouts(round(SELECTED * setup.rows)))
    names = [name for name in methods() if name not in UNMEASURED]
    steps = timer.in_turn({name: partial(run_step, host, Variant(name)) for name in names}, repeats)
    figures = compared({name: [repeat[name] for repeat in steps] for name in names})
    return {
        name: {"rows": len(host.selected(build(name))), **figure}
        for name, figure in figures.items()
    }


def of_zero_advantage(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``zero_advantage``."""
    from benchmarks.verl_host import VerlHost

    figures = {}
    for share in ZERO_ADVANTAGE:
        without = round(share * setup.rows)
        scored = max(1, round(SELECTED * (setup.rows - without)))
        host = VerlHost(worker, setup.rollouts(scored, without))
        for name, figure in run_variants(host, repeats, EPOCHS).items():
            figures[f"{without} without advantage, {scored} scored: {name}"] = figure
    return figures


def of_stages(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``stages``."""
    from benchmarks.verl_host import VerlHost

    host = VerlHost(worker, setup.rollouts(round(SELECTED * setup.rows)))
    # The optimiser has its state from the first update on.
    run_step(host, VARIANTS[GRPO])
    return stage_peaks(host)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"methods": of_methods, "zero_advantage": of_zero_advantage, "stages": of_stages}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--setup", choices=SETUPS, default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the figures; docs/methods.md has results/methods-cpu.json",
    )
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    prepare_process(setup.device)
    from benchmarks.verl_host import default_actor, make_worker

    origin = timer.origin(
        setup.device, f"python -m benchmarks.bench_training_step {' '.join(sys.argv[1:])}"
    )
    figures = kinds[args.what](make_worker(setup, False, default_actor(setup)), setup, args.repeats)
    print(origin, f"{setup}", "", *timer.table(figures), sep="\n")
    if args.json:
        args.json.write_text(
            json.dumps({"origin": origin, args.what: figures}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
