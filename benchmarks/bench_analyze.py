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
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import measuring
from benchmarks.gpu_check.smollm2 import problem
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.smollm2 import load_smollm2
from verl_cpu.tiny.task import problems, solve

METHODS = ("grail", "oar_g", "rlsd", "surprisal")
WAYS = {"one at a time": "1", "together": "4096"}
"""``--tokens`` of the command."""


def small_rows(count: int) -> list[dict[str, Any]]:
    """Solutions of the tiny model's task, as lines of the command's file."""
    rng = Random(0)
    chains = problems("train", count, seed=0)
    return [row(chain.text, solve(chain, 0.2, rng), str(chain.answer)) for chain in chains]


def gsm8k_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The first solutions of a file of GSM8K, likewise, with their answer in a box."""
    solved = [problem(line, worked=True) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [row(one.text, one.solution, one.answer) for one in solved]


def row(question: str, response: str, answer: str) -> dict[str, Any]:
    """One line; the reward says incorrect, so that every method scores it."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "response": response,
        "ground_truth": answer,
        "reward": 0.0,
    }


def analyse(model: Path, rows: Sequence[dict[str, Any]], tokens: str) -> dict[str, float]:
    """Processor seconds and peak GB (resident) of one call of the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "responses.jsonl")
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        command = [sys.executable, "-m", "grail_advantage.analyze", "--model", str(model), "--dtype", "float32"]
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
    parser.add_argument("--output-dir", type=Path, default=measuring.RESULTS)
    options = parser.parse_args()
    clock, count = measuring.Clock("cpu"), options.responses * options.blocks
    words = ["small"] if options.set == "small" else ["smollm2", "--data", "gsm8k_test.jsonl"]
    command = " ".join(["python -m benchmarks.bench_analyze", *words])
    command += f" --responses {options.responses} --blocks {options.blocks}"
    result = measuring.record(f"analyze_{options.set}", clock, command)
    rows = small_rows(count) if options.set == "small" else gsm8k_rows(options.data, count)
    with tempfile.TemporaryDirectory() as folder:
        for part in load_shipped() if options.set == "small" else load_smollm2():
            part.save_pretrained(folder)
        result |= {"methods": METHODS, "responses": count, "start": analyse(Path(folder), rows[:1], "1"), "blocks": []}
        for block in range(options.blocks):
            some = rows[block * options.responses :][: options.responses]
            ways = list(WAYS) if block % 2 == 0 else list(reversed(WAYS))
            result["blocks"].append({way: analyse(Path(folder), some, WAYS[way]) for way in ways})
            measuring.write(result, options.output_dir)


if __name__ == "__main__":
    main()
