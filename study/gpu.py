"""The second study's comparison on a GPU: a shell script of whole verl runs with DeepMath, and what it costs.

Not run on a GPU by anybody yet. Runs are those of the launch scripts with the knobs of ``scripts/sizing.py``, arms are
``ADV_ESTIMATOR``; a run that is finished ends at once, so the script can be started again after a break.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

ARMS = ("uniform", "grail", "surprisal", "random_token")
"""The arms that the plan compares."""
RATES = ("5e-7", "1e-6", "2e-6")
"""Around the published 1e-6."""
TUNING_SEED = 1001
PROJECT = "study_gpu"
BENCHMARKS = "amc23,aime24,minerva_math,olympiadbench"
TUNING_BENCHMARK = "math500"
"""Problems that the outcome is not measured on."""
SAMPLES = 8
TEMPERATURE = 0.6
_ROOT = Path(__file__).parents[1]


@cache
def sizing() -> ModuleType:
    """``scripts/sizing.py``."""
    spec = importlib.util.spec_from_file_location("study_sizing", _ROOT / "scripts" / "sizing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def script(
    name: str, *, gpus: int, memory: float, nodes: int = 1, seeds: int = 10, rates: Mapping[str, str] | None = None
) -> str:
    """The shell script: tuning while no learning rates are given, then the main runs and their evaluation.

    Args:
        name: a model of ``scripts/sizing.py``, by its key or its path on the hub.
        gpus: on a node.
        memory: GB of one of them.
        nodes: nodes.
        seeds: main seeds.
        rates: the learning rate of every arm.

    Raises:
        ValueError: an unknown model, one that does not fit, or rates of other arms.
    """
    known = sizing().MODELS
    model = next((one for key, one in known.items() if name in (key, one.path)), None)
    if model is None:
        raise ValueError(f"--model={name} has no launch script here; choose one of {', '.join(known)}")
    setup = sizing().choose(model, gpus, memory, nodes)
    if setup is None:
        raise ValueError(f"--model={name} does not fit on {nodes} x {gpus} GPUs of {memory:g} GB; docs/gpu_sizing.md")
    if rates is not None and set(rates) != set(ARMS):
        raise ValueError(f"--rates wants ARM=RATE for each of {', '.join(ARMS)}")
    runs = [(arm, TUNING_SEED, rate) for rate in RATES for arm in ARMS] if rates is None else [
        (arm, seed, rates[arm]) for seed in range(1, seeds + 1) for arm in ARMS
    ]  # fmt: skip
    hours = sizing().hours(model, setup)
    lines = [
        "#!/usr/bin/env bash",
        f"# Token weights on {model.path}, DeepMath: {'tuning' if rates is None else 'main runs'}, "
        f"{len(runs)} runs of {sizing().STEPS} steps. Not run on a GPU yet.",
        f"# Estimated: {hours:.1f} h a run, {hours * len(runs) * setup.all_gpus:.0f} GPU-hours; evaluation comes on top.",
        "set -euo pipefail",
        "bash scripts/prepare_data.sh",
        '"${PYTHON:-python3}" -m pip install --quiet ./study/random_token',
    ]
    benchmarks = TUNING_BENCHMARK if rates is None else BENCHMARKS
    for arm, seed, rate in runs:
        experiment = f"{name.rsplit('/', 1)[-1]}-{arm}-rate{rate}-seed{seed}"
        knobs = {"ADV_ESTIMATOR": arm, "SEED": str(seed), "LEARNING_RATE": rate, "TEST_FREQ": "-1"}
        knobs |= {"PROJECT_NAME": PROJECT, "EXPERIMENT_NAME": experiment}
        checkpoint = f"outputs/{PROJECT}/{experiment}/checkpoints/global_step_{sizing().STEPS}"
        lines += [
            " ".join(f"{key}={shlex.quote(value)}" for key, value in knobs.items())
            + f" {sizing().command(model, setup)}",
            f"bash scripts/evaluate.sh --model {checkpoint} --benchmarks {benchmarks} --samples {SAMPLES} "
            f"--temperature {TEMPERATURE} --seed {seed} --output-dir outputs/{PROJECT}/scores/{experiment}",
        ]
    if rates is not None:
        lines += [
            f"bash scripts/evaluate.sh --compare {_scores(name, first, rates, seed)} {_scores(name, second, rates, seed)}"
            for second, first in (("grail", "uniform"), ("surprisal", "uniform"), ("surprisal", "random_token"))
            for seed in range(1, seeds + 1)
        ]
    return "\n".join(lines) + "\n"


def _scores(name: str, arm: str, rates: Mapping[str, str], seed: int) -> str:
    return f"outputs/{PROJECT}/scores/{name.rsplit('/', 1)[-1]}-{arm}-rate{rates[arm]}-seed{seed}"


def parse_rates(words: Sequence[str]) -> dict[str, str] | None:
    """``ARM=RATE`` words; ``None`` without any."""
    if not words:
        return None
    if any("=" not in one for one in words):
        raise ValueError(f"--rates wants ARM=RATE for each of {', '.join(ARMS)}")
    return dict(one.split("=", 1) for one in words)
