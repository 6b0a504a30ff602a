"""What the training side of a step costs: with each method, and where some responses have no advantage.

    python -m benchmarks.bench_training_step methods          # what each registered method adds
    python -m benchmarks.bench_training_step zero_advantage   # GRPO, uniform and GRAIL, leaving such responses out or not

A step is: old log-probabilities, the method's pass and weights, an epoch of the actor update, with verl's own worker and
default options. GRPO runs every response and has no weights. Responses are left out of the update as
``skip_zero_advantage=auto`` does it, and old log-probabilities are its own as with ``reuse_log_probs=auto``. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import timer
from benchmarks.setup import SETUPS, Setup, prepare_process
from grail_advantage.method import build, methods

if TYPE_CHECKING:
    from benchmarks.verl_host import VerlHost

BASELINE, GRPO = "uniform", "GRPO"
VARIANTS = {
    GRPO: (None, False, False),
    "uniform": ("uniform", False, False),
    "uniform, skipping": ("uniform", True, False),
    "uniform, skipping, own forward": ("uniform", True, True),
    "GRAIL": ("grail", False, False),
    "GRAIL, skipping": ("grail", True, False),
    "GRAIL, own forward": ("grail", False, True),
    "GRAIL, skipping, own forward": ("grail", True, True),
}
"""Method, whether responses are left out, and whether old log-probabilities are the update's own. ``uniform`` gives every
token weight 1: GRPO with what all methods share."""
ONE_EPOCH = "1 epoch, x GRPO"
SELECTED, ZERO_ADVANTAGE = 0.35, (0.0, 0.25, 0.5, 0.75)
"""Share of the responses with an advantage that needs scores, and shares of responses without an advantage."""


def run_step(host: VerlHost, name: str | None, skipping: bool = False, reusing: bool = False) -> list[float]:
    """Seconds of a step with one epoch: of the old log-probabilities, the method's pass, the weights and the update;
    without a method it is GRPO's. ``skipping``, ``reusing``: as :meth:`VerlHost.update` has them."""
    timed = partial(timer.seconds, host.device)
    forward = 0.0 if reusing else timed(host.forward)
    method, made, host.pass_seconds = build(name) if name else None, [], 0.0
    weights = timed(lambda: made.append(host.weigh(method).advantages if method else host.base_advantages()))
    update = timed(partial(host.update, *made, skipping=skipping, reusing=reusing))
    return [forward, host.pass_seconds, weights - host.pass_seconds, update]


def run_variants(host: VerlHost, repeats: int, epochs: int) -> dict[str, dict[str, list[float]]]:
    """Steps of all variants in turn: their seconds, and multiples of GRPO's of the same repeat; further epochs are as
    long as the first."""
    variants = {variant: partial(run_step, host, *of) for variant, of in VARIANTS.items()}
    steps, found = timer.in_turn(variants, repeats), {}
    for variant in VARIANTS:
        found[variant] = {"1 epoch, seconds": [sum(of[variant]) for of in steps]}
        for count, name in ((1, ONE_EPOCH), (epochs, f"{epochs} epochs, x GRPO")):
            whole = [{key: sum(of) + (count - 1) * of[-1] for key, of in repeat.items()} for repeat in steps]
            found[variant][name] = [of[variant] / of[GRPO] for of in whole]
    return found


def compared(repeats: Mapping[str, list[list[float]]]) -> dict[str, dict[str, Any]]:
    """For each method, of which ``repeats`` has the seconds of :func:`run_step`, the ``forwards`` over the batch that it
    adds, in each repeat, and the ``ratio`` of its step to the baseline's, put together from medians: the old
    log-probabilities and the update are the same work in every step."""
    forward, _, _, update = (median(of) for of in zip(*chain.from_iterable(repeats.values()), strict=True))
    added = {name: [of_pass + weights for _, of_pass, weights, _ in steps] for name, steps in repeats.items()}
    whole = {name: forward + median(of) + update for name, of in added.items()}
    return {
        name: {"forwards": [one / forward for one in of], "ratio": whole[name] / whole[BASELINE]}
        for name, of in added.items()
    }


def of_methods(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``methods``; ``rows`` is how many responses are scored."""
    from benchmarks.verl_host import VerlHost

    host = VerlHost(worker, setup.rollouts(round(SELECTED * setup.rows)))
    steps = timer.in_turn({name: partial(run_step, host, name) for name in methods()}, repeats)
    figures = compared({name: [repeat[name] for repeat in steps] for name in methods()})
    return {name: {"rows": len(host.selected(build(name))), **of} for name, of in figures.items()}


def of_zero_advantage(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``zero_advantage``."""
    from benchmarks.verl_host import VerlHost

    found = {}
    for without in (round(share * setup.rows) for share in ZERO_ADVANTAGE):
        scored = max(1, round(SELECTED * (setup.rows - without)))
        variants = run_variants(VerlHost(worker, setup.rollouts(scored, without)), repeats, epochs=4)
        found |= {f"{without} without advantage, {scored} scored: {name}": of for name, of in variants.items()}
    return found


def of_stages(worker: Any, setup: Setup, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of ``stages``."""
    from benchmarks.verl_host import VerlHost

    host = VerlHost(worker, setup.rollouts(round(SELECTED * setup.rows)))
    host.update(host.base_advantages(), reusing=True)  # the optimiser's state is there in every stage
    return stage_peaks(host)


def stage_peaks(host: VerlHost) -> dict[str, dict[str, float]]:
    """The peak of memory of each stage of a step that runs every response, in GiB."""
    grail = build("grail")
    advantages_BT = host.base_advantages()
    stages = {
        "old log-probabilities": host.forward,
        "GRAIL's pass": lambda: host.scores(grail, host.selected(grail)),
        "actor update": lambda: host.update(advantages_BT),
        "actor update, own forward": lambda: host.update(advantages_BT, reusing=True),
    }
    return {stage: {"GiB": timer.peak_memory(host.device, run) / 2**30} for stage, run in stages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"methods": of_methods, "zero_advantage": of_zero_advantage, "stages": of_stages}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--setup", choices=SETUPS, default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures; docs/methods.md has results/methods-cpu.json")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    prepare_process(setup.device)
    from benchmarks.verl_host import default_actor, make_worker

    origin = timer.origin(setup.device, f"python -m benchmarks.bench_training_step {' '.join(sys.argv[1:])}")
    figures = kinds[args.what](make_worker(setup, False, default_actor(setup)), setup, args.repeats)
    print(origin, f"{setup}", "", *timer.table(figures), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"origin": origin, args.what: figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
