"""The parts: what each shows, what it needs, and how it is run in a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.outcome import FAILED, NOT_RUN, Outcome, status_of

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
            "gpu_check.plain",
            ("torch", "transformers", "numpy", "pydantic"),
        ),
        Part(
            "b",
            "TRL alone: the shipped tiny model trained with GRAIL and with uniform",
            "gpu_check.trl_runs",
            ("torch", "transformers", "trl", "datasets", "accelerate", "math_verify", "pydantic"),
        ),
        Part("c", "verl's engine: the training side of the recipe", "gpu_check.engine", _VERL),
        Part("d", "flash attention: packed rows, sequence parallelism", "gpu_check.flash", (*_VERL, "flash_attn")),
        Part(
            "e",
            "whole verl runs with vLLM: the shipped tiny model, GRAIL and uniform, evaluation",
            "gpu_check.verl_runs",
            (*_VERL, "vllm", "transfer_queue"),
        ),
        Part(
            "f",
            "a whole step at the shape of Qwen3-4B, with random weights and given rewards",
            "gpu_check.large_run",
            (*_VERL, "vllm", "transfer_queue"),
        ),
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
    lacking = missing(part)
    path = result_path(folder, part)
    if lacking:
        result = _not_run(
            part, f"needs {', '.join(lacking)}: scripts/setup_gpu.sh, or scripts/wheelhouse.py without an index"
        )
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")).get("status") == NOT_RUN:
            write(path, result)
        return result
    path.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "gpu_check.one_part", part.letter, part.module, str(path), device]
    ended, output = run_command(command, limit)
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _not_run(part, "")
    if ended is None:
        _add_failure(result, f"ends within {limit / 60:g} minutes", "stopped; the checks above were done by then")
    elif ended != 0:
        _add_failure(result, "runs to its end", f"exit status {ended}")
    result |= {"status": status_of(result["checks"]), "seconds": round(time.monotonic() - start, 1)}
    if result["status"] == FAILED:
        result["output"] = output.splitlines()[-_TAIL_LINES:]
    write(path, result)
    return result


def run_command(
    command: list[str],
    limit: float | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    each_line: Callable[[], None] | None = None,
) -> tuple[int | None, str]:
    """Run a command from the project's root, showing its output.

    Args:
        command: the command.
        limit: seconds after which it is stopped together with everything that it has started; ``None``: whoever stops this
            process stops it too.
        environment: in place of this process's.
        each_line: called after each line of output.

    Returns:
        Its exit status, ``None`` where it was stopped; and its output, the project's folder written as ``.``.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=limit is not None,
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop) if limit is not None else None
    if timer is not None:
        timer.start()
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            sys.stderr.write(line)
            if each_line is not None:
                each_line()
        code = process.wait()
    finally:
        if timer is not None:
            timer.cancel()
        if process.poll() is None:
            if limit is not None:
                stop()
            else:
                process.kill()
            process.wait()
    return None if stopped.is_set() else code, "".join(lines).replace(str(ROOT), ".")


def last_line(output: str) -> str:
    """The last line that is not empty."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Save a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _not_run(part: Part, why: str) -> dict[str, Any]:
    checks = [{"name": part.title, "status": NOT_RUN, "said": why}] if why else []
    return {"name": part.letter, "status": NOT_RUN, "checks": checks, "figures": {}}


def _add_failure(result: dict[str, Any], name: str, detail: str) -> None:
    result["checks"].append({"name": name, "status": FAILED, "said": detail})


def run_part(part: Part, path: Path, device: str) -> None:
    """The body of :func:`execute`'s process."""
    from measuring import Clock, record, said_by

    described = record(part.letter, device, Clock(device), 1)
    described["command"] = f"bash scripts/gpu_check.sh {'--dry ' if device == 'cpu' else ''}{part.letter}"
    if revision := said_by("git", "rev-parse", "--short", "HEAD"):
        described["revision"] = revision
    module = importlib.import_module(part.module)
    module.run(Outcome(path, described), device)
