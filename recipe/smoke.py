"""The smoke run's problems and claims (``scripts/smoke_run.sh``).

    python -m recipe.smoke data DIR                            problems for training, validation and evaluation; no network
    python -m recipe.smoke report RUN_DIR EVALUATION_DIR       the claims, one line each; status 1 where one is not proved

The problems are products of two numbers and a sum: easy enough that a small model answers some correctly, hard enough that it
answers some incorrectly, so that groups of responses differ and the method has responses to weight.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipe.data import prepare
from recipe.run_life.identity import RUN_DEFINITION

STEPS = 2
BENCHMARK = "aime24"
"""The name that the evaluation's problems go by; they are none of AIME's."""
_SIZES = {"deepmath": 64, "amc23": 4, BENCHMARK: 16}
SUMMARY = "smoke.json"


class Claim(NamedTuple):
    """A claim that the run has to prove."""

    what: str
    proved: bool
    figure: str


def write_problems(folder: Path, seed: int = 0) -> None:
    """Write the files that ``scripts/prepare_data.sh`` makes, with problems of the smoke run's own."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as local:
        for name, size in _SIZES.items():
            rows = [_problem(generator, prompt=name == "deepmath") for _ in range(size)]
            Path(local, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        benchmarks = ",".join(name for name in _SIZES if name != "deepmath")
        arguments = ["--local-dir", local, "--benchmarks", benchmarks, "--output-dir", str(folder)]
        if prepare.main(arguments) != 0:
            raise RuntimeError(f"recipe.data.prepare {' '.join(arguments)} failed")


def _problem(generator: random.Random, *, prompt: bool) -> dict[str, Any]:
    a, b, c = generator.randint(11, 99), generator.randint(11, 199), generator.randint(100, 999)
    text, answer = f"What is ${a} \\cdot {b} + {c}$?", str(a * b + c)
    if prompt:
        return {"prompt": [{"role": "user", "content": text}], "solution": answer}
    return {"problem": text, "answer": answer}


def claims(run_dir: Path, evaluation_dir: Path) -> list[Claim]:
    """The smoke run's claims, checked on the files of training and evaluation.

    Args:
        run_dir: the experiment's folder below ``outputs/``.
        evaluation_dir: the evaluation's ``--output-dir``.

    Raises:
        OSError: a file is missing.
    """
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {record["step"]: record["data"] for record in map(json.loads, lines)}
    trained = [steps[number] for number in range(1, STEPS + 1) if number in steps]
    checkpoint = run_dir / "checkpoints" / f"global_step_{STEPS}"
    definition = json.loads((run_dir / "checkpoints" / RUN_DEFINITION).read_text(encoding="utf-8"))["definition"]
    method = definition["algorithm.adv_estimator"]
    results = json.loads((evaluation_dir / "results.json").read_text(encoding="utf-8"))["benchmarks"][BENCHMARK]

    checked: list[Claim] = []

    def claim(what: str, name: str, holds: Callable[[float], bool], *, once: bool = False) -> None:
        values = [data.get(name, math.nan) for data in trained]
        proved = (any if once else all)(holds(value) for value in values) and bool(values)
        checked.append(Claim(what, proved, ", ".join(f"{value:.3g}" for value in values)))

    checked.append(Claim(f"{STEPS} steps were trained", len(trained) == STEPS, f"{len(trained)} in metrics.jsonl"))
    claim("the loss is a number", "actor/pg_loss", math.isfinite)
    claim("the gradients are numbers, and not all 0", "actor/grad_norm", lambda v: math.isfinite(v) and v >= 0)
    checked[-1] = checked[-1]._replace(
        proved=checked[-1].proved and any(data.get("actor/grad_norm") for data in trained)
    )
    claim("correct and incorrect answers in one batch", "critic/score/mean", lambda v: 0 < v < 1, once=True)
    claim("engine and trainer agree on the model", "training/rollout_actor_probs_pearson_corr", lambda v: v > 0.9)
    if f"{method}/selected_rate" in (trained[0] if trained else {}):
        if method != "uniform":
            claim(f"{method} chose responses", f"{method}/selected_rate", lambda v: v > 0, once=True)
            claim(f"{method}'s weights differ between tokens", f"{method}/weight_deviation", lambda v: v > 0, once=True)
        claim("every score is a number", f"{method}/non_finite_rate", lambda v: v == 0)
    checked.append(Claim("the checkpoint was written", (checkpoint / "actor").is_dir(), checkpoint.name))
    answered = 1 - results["unanswered"]["value"]
    problems = f"{results['problems']} problems, {answered:.0%} of the responses answered"
    checked.append(Claim("the checkpoint was evaluated, and answers", answered > 0, problems))
    return checked


def report(run_dir: Path, evaluation_dir: Path) -> bool:
    """Print the claims, write them to ``RUN_DIR/smoke.json``, and say whether all were proved."""
    checked = claims(run_dir, evaluation_dir)
    for claim in checked:
        print(f"  {'proved    ' if claim.proved else 'NOT PROVED'}  {claim.what}  ({claim.figure})")
    summary = [claim._asdict() for claim in checked]
    (run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return all(claim.proved for claim in checked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe.smoke", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data").add_argument("folder", type=Path)
    of_report = commands.add_parser("report")
    of_report.add_argument("run_dir", type=Path)
    of_report.add_argument("evaluation_dir", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "data":
        write_problems(options.folder)
        return 0
    return 0 if report(options.run_dir, options.evaluation_dir) else 1


if __name__ == "__main__":
    sys.exit(main())
