"""The parts: what each shows, what it needs, and how it is run in a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.outcome import FAILED, NOT_RUN, Outcome, status_of

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 480
"""Most that a part may take."""
PROJECT = "grail-advantage"
"""Stands for this project being installed, without which verl does not find its plug-in."""
_TAIL_LINES = 30


@dataclass(frozen=True)
class Part:
    """One part; ``module`` has a function ``run(outcome, device)``."""

    letter: str
    title: str
    module: str
    needs: tuple[str, ...]
    """Modules, or :data:`PROJECT`."""


_VERL = ("torch", "transformers", "verl", "tensordict", "ray", "hydra", "peft", PROJECT)
PARTS = {
    part.letter: part
    for part in (
        Part(
            "a",
            "torch and transformers alone: weights in bfloat16, time and memory of the passes",
            "benchmarks.gpu_check.plain",
            ("torch", "transformers", "numpy", "pydantic"),
        ),
        Part(
            "b",
            "TRL alone: the shipped tiny model trained with GRAIL and with uniform",
            "benchmarks.gpu_check.trl_runs",
            ("torch", "transformers", "trl", "datasets", "accelerate", "math_verify", "pydantic"),
        ),
        Part("c", "verl's engine: the training side of the recipe", "benchmarks.gpu_check.engine", _VERL),
    )
}
"""By letter, the most valuable first."""


def missing(part: Part) -> list[str]:
    """Modules that the part needs and this interpreter lacks."""
    return [name for name in part.needs if not _is_there(name)]


def _is_there(name: str) -> bool:
    if name != PROJECT:
        # TRL is in a folder of its own beside verl, which cannot start where it can import it.
        return importlib.util.find_spec(name) is not None or Path(sys.prefix, name, name).is_dir()
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def result_path(folder: Path, part: Part) -> Path:
    """Where a part's result is."""
    return folder / f"{part.letter}.json"


def execute(part: Part, folder: Path, device: str = "cuda", limit: float = LIMIT_SECONDS) -> dict[str, Any]:
    """Run a part in a process of its own and return its result, which is also in ``folder``.

    A part that lacks a package is not run; the result of an earlier run of it stays where it is.

    Args:
        part: the part.
        folder: for its result.
        device: ``cuda``, or ``cpu`` in tests.
        limit: seconds after which it is stopped.
    """
    path = result_path(folder, part)
    nothing = {"name": part.letter, "checks": [], "figures": {}}
    if lacking := missing(part):
        why = f"needs {', '.join(lacking)}: scripts/setup_gpu.sh, or scripts/wheelhouse.py without an index"
        check = {"name": part.title, "status": NOT_RUN, "said": why}
        result = {**nothing, "status": NOT_RUN, "checks": [check]}
        if not path.exists():
            write(path, result)
        return result
    path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    log, start = folder / f"{part.letter}.log", time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_check.parts", part.letter, part.module, str(path), device]
    ended = run_command(command, log, limit)
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else nothing
    checks = result["checks"]
    if ended is None:
        said = "stopped; the checks above were done by then"
        checks.append({"name": f"ends within {limit / 60:g} minutes", "status": FAILED, "said": said})
    elif ended != 0:
        checks.append({"name": "runs to its end", "status": FAILED, "said": f"exit status {ended}"})
    result |= {"status": status_of(checks), "seconds": round(time.monotonic() - start, 1)}
    if result["status"] == FAILED:
        result["output"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    write(path, result)
    return result


def run_command(command: list[str], log: Path, limit: float) -> int | None:
    """Run a command from the project's root, its output in ``log``, and return its exit status; after ``limit`` seconds it is
    stopped together with everything that it has started, and the status is ``None``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Save a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run_part(letter: str, module: str, path: str, device: str) -> None:
    """The body of :func:`execute`'s process."""
    from benchmarks.measuring import Clock, record

    command = f"bash scripts/gpu_check.sh {'--dry ' if device == 'cpu' else ''}{letter}"
    importlib.import_module(module).run(Outcome(Path(path), record(letter, Clock(device), command)), device)


if __name__ == "__main__":
    run_part(*sys.argv[1:])
