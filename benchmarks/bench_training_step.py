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
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import timer
from benchmarks.setup import SETUPS, prepare_process
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
# They need a fit to values, and a reference model
UNMEASURED = ("fitted", "progress_advantage")


class Variant(NamedTuple):
    """How a step is run."""

    # Without one it is GRPO's
    method: str | None = None
    # Leaves out responses without an advantage
    skips: bool = False
    # Takes old log-probabilities from the update's own forward
    reuses: bool = False


VARIANTS = {
    GRPO: Variant(),
    # Gives every token weight 1: GRPO with what all methods share
    "uniform": Variant("uniform"),
    "uniform, skipping": Variant("uniform", skips=True),
    "uniform, skipping, own forward": Variant("uniform", skips=True, reuses=True),
    "GRAIL": Variant("grail"),
    "GRAIL, skipping": Variant("grail", skips=True),
    "GRAIL, own forward": Variant("grail", reuses=True),
    "GRAIL, skipping, own forward": Variant("grail", skips=True, reuses=True),
}


class Seconds(NamedTuple):
    """Seconds of a step with one epoch, by stage."""

    # The old log-probabilities
    forward: float
    # The method's pass
    scores: float
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


def run_variants(host: VerlHost, repeats: int, epochs: int) -> timer.Table:
    """Steps of all variants in turn: their seconds, and multiples of GRPO's of the same repeat."""
    runs = {name: partial(run_step, host, variant) for name, variant in VARIANTS.items()}
    steps = timer.in_turn(runs, repeats)
    figures = {}
    for name, seconds in steps.items():
        figures[name] = {"1 epoch, seconds": [sum(step) for step in seconds]}
        for count, column in ((1, ONE_EPOCH), (epochs, f"{epochs} epochs, x GRPO")):
            pairs = zip(seconds, steps[GRPO], strict=True)
            figures[name][column] = [
                step.with_epochs(count) / grpo.with_epochs(count) for step, grpo in pairs
            ]
    return figures


def stage_peaks(host: VerlHost) -> timer.Table:
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


def compared(repeats: Mapping[str, Sequence[Seconds]]) -> timer.Table:
    """For each method the ``forwards`` over the batch that it adds, in each repeat, and the ``ratio`` of its step to the
    baseline's, put together from medians: the old log-probabilities and the update are the same work in every step."""
    steps = list(itertools.chain(*repeats.values()))
    forward = median(step.forward for step in steps)
    shared = forward + median(step.update for step in steps)
    added = {}
    for name, steps in repeats.items():
        added[name] = [step.scores + step.weights for step in steps]
    # A forward of 2 s, an update of 6 s and 0.8 s added: 0.4 forwards, and 1.1 times the baseline's 8 s.
    baseline = shared + median(added[BASELINE])
    figures = {}
    for name, seconds in added.items():
        forwards = [value / forward for value in seconds]
        figures[name] = {"forwards": forwards, "ratio": (shared + median(seconds)) / baseline}
    return figures


def of_methods(host_of: Callable, rows: int, repeats: int) -> timer.Table:
    """The figures of ``methods``; ``rows`` among them is how many responses are scored. ``host_of`` makes a host by numbers
    of responses: scored, and without advantage."""
    host = host_of(round(SELECTED * rows))
    names = [name for name in methods() if name not in UNMEASURED]
    runs = {name: partial(run_step, host, Variant(name)) for name in names}
    figures = compared(timer.in_turn(runs, repeats))
    return {
        name: {"rows": len(host.selected(build(name))), **figure}
        for name, figure in figures.items()
    }


def of_zero_advantage(host_of: Callable, rows: int, repeats: int) -> timer.Table:
    """The figures of ``zero_advantage``."""
    figures = {}
    for share in ZERO_ADVANTAGE:
        without = round(share * rows)
        scored = max(1, round(SELECTED * (rows - without)))
        for name, figure in run_variants(host_of(scored, without), repeats, EPOCHS).items():
            figures[f"{without} without advantage, {scored} scored: {name}"] = figure
    return figures


def of_stages(host_of: Callable, rows: int, repeats: int) -> timer.Table:
    """The figures of ``stages``."""
    host = host_of(round(SELECTED * rows))
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
    # verl reads the environment when it is imported.
    from benchmarks.verl_host import VerlHost, default_actor, make_worker

    origin = timer.origin(
        setup.device, f"python -m benchmarks.bench_training_step {' '.join(sys.argv[1:])}"
    )
    worker = make_worker(setup, False, default_actor(setup))
    host_of = lambda *counts: VerlHost(worker, setup.rollouts(*counts))  # noqa: E731
    figures = kinds[args.what](host_of, setup.rows, args.repeats)
    print(origin, f"{setup}", "", *timer.table(figures), sep="\n")
    if args.json:
        record = {"origin": origin, args.what: figures}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
