"""What ``python -m grail_advantage.analyze`` costs with one response a forward, and with several.

    python -m benchmarks.bench_analyze smollm2 --data gsm8k_test.jsonl
    python -m benchmarks.bench_analyze small

Four methods give weights to written solutions, all of which count as incorrect: with ``smollm2`` (SmolLM2-135M, float32)
GSM8K's in the file's order, with ``small`` (the SFT-initialised model of the CPU example) those of its own task.
Every block of solutions is analysed both ways, one after the other, by the command itself, whose start counts.
``start`` is one solution's call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import timer
from benchmarks.gpu_check.trl_runs import problem
from recipe.tiny.shipped import load_shipped
from recipe.tiny.smollm2 import load_smollm2
from recipe.tiny.task import problems, solve

METHODS = ("grail", "oar_g", "rlsd", "surprisal")
VARIANTS = {"one at a time": "1", "together": "4096"}
"""``--tokens`` of the command."""


def solved(data: Path | None, count: int) -> list[dict[str, Any]]:
    """Solutions of GSM8K, or of the tiny model's task, as lines of the command's file. The reward says incorrect, so that every
    method scores them."""
    if data is None:
        chains, rng = problems("train", count, seed=0), Random(0)
        found = [(chain.text, solve(chain, 0.2, rng), str(chain.answer)) for chain in chains]
    else:
        lines = data.read_text(encoding="utf-8").splitlines()[:count]
        found = [(one.text, one.solution, one.answer) for one in (problem(line, worked=True) for line in lines)]
    return [
        {"prompt": [{"role": "user", "content": text}], "response": solution, "ground_truth": answer, "reward": 0.0}
        for text, solution, answer in found
    ]


def analyse(model: str, rows: list[dict[str, Any]], tokens: str) -> dict[str, float]:
    """Processor seconds and peak GB (resident) of one call of the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "responses.jsonl")
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        command = [sys.executable, "-m", "grail_advantage.analyze", "--model", model, "--dtype", "float32"]
        command += ["--responses", str(file), "--out", f"{folder}/analysis", "--tokens", tokens, "--device", "cpu"]
        command += [word for name in METHODS for word in ("--method", name)]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ends with status {status}")
    return {"seconds": round(used.ru_utime + used.ru_stime, 2), "peak GB": round(used.ru_maxrss * 1024 / 1e9, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("small", "smollm2"))
    parser.add_argument("--data", type=Path, help="GSM8K's rows, for smollm2")
    parser.add_argument("--responses", type=int, default=24, help="of a block")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--results", type=Path, default=timer.RESULTS, help="folder to write to")
    options = parser.parse_args()
    if (options.set == "smollm2") != (options.data is not None):
        parser.error("smollm2 needs --data, and small has problems of its own")
    result = timer.record(
        f"analyze_{options.set}", "cpu", f"python -m benchmarks.bench_analyze {' '.join(sys.argv[1:])}"
    )
    rows = solved(options.data, options.responses * options.blocks)
    blocks = [rows[at : at + options.responses] for at in range(0, len(rows), options.responses)]
    with tempfile.TemporaryDirectory() as folder:
        for part in load_shipped() if options.set == "small" else load_smollm2():
            part.save_pretrained(folder)
        start = analyse(folder, rows[:1], "1")

        def analyse_next(of: Iterator[list[dict[str, Any]]], tokens: str) -> dict[str, float]:
            return analyse(folder, next(of), tokens)

        variants = {name: partial(analyse_next, iter(blocks), tokens) for name, tokens in VARIANTS.items()}
        found = list(timer.in_turn(variants, len(blocks), warm=False))
    timer.write(result | {"methods": METHODS, "responses": len(rows), "start": start, "blocks": found}, options.results)


if __name__ == "__main__":
    main()
