"""What does a change of credit do? Arms of the small model, paired by seed: docs/credit.md has the plans and the tables.

    PYTHONPATH=.venv/trl python -m examples.five_arms sums              the five arms, all runs that outputs/five_arms lacks
    PYTHONPATH=.venv/trl python -m examples.five_arms misled --arms uniform fitted fitted_shuffled --seeds 10
    PYTHONPATH=.venv/trl python -m examples.five_arms sums --effects    of these runs' dumps: which tokens moved, and how far
    python -m grail_advantage.compare outputs/five_arms/sums/grail/seed* --against outputs/five_arms/sums/uniform/seed*

A run is ``examples/trl_grail.py`` in a process of its own. One that has ended is not repeated, one that broke off is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples import trl_grail
from grail_advantage.compare import read_run
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.effect import PROBABILITIES, effect_figures
from grail_advantage.text_io import table
from verl_cpu.tiny.make_models import make_long, make_misled
from verl_cpu.tiny.sampling import MAX_LONG_TOKENS, MAX_RESPONSE_TOKENS
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import random_problems

FOLDER = Path("outputs/five_arms")
ARMS = {
    "uniform": "--method uniform",
    "grail": "--method grail",
    "shuffled": "--method grail --control shuffled",
    "answer": "--method grail --control answer",
    "stock": f"--method {trl_grail.STOCK}",
    "fitted": "--method fitted:file={fit}",
    "fitted_shuffled": "--method fitted:file={fit} --control shuffled",
}
FIVE = ["uniform", "grail", "shuffled", "answer", "stock"]
STOCK_SEEDS = (0, 1)  # it is to be uniform to the bit


class Task(NamedTuple):
    tokens: int  # of a response at most
    rates: Sequence[str]  # learning rates of the sweep


TASKS = {
    "sums": Task(MAX_RESPONSE_TOKENS, ("1e-4", "3e-4", "1e-3")),
    "long": Task(MAX_LONG_TOKENS, ("5e-5", "1e-4", "2e-4")),
    "misled": Task(MAX_RESPONSE_TOKENS, ("1e-4", "3e-4", "1e-3")),
}
SWEEP_SEED = 100
HELD_OUT = 256
SIZE = "--prompts 8 --rollouts 8 --micro-batch 64 --lora-rank 0 --steps 16 --save-steps 0 --no-bf16"
EVALUATION = "--eval-every 8 --dump-every 8 --effect-every 8"
METRIC = "eval_reward"
REWARD = "verl_cpu.tiny.task:compute_score"


class Run(NamedTuple):
    task: str
    arm: str
    seed: int
    rate: str

    @property
    def folder(self) -> Path:
        parts = ("rates", self.rate) if self.seed == SWEEP_SEED else ()
        return FOLDER.joinpath(self.task, *parts, self.arm, f"seed{self.seed}")


def prepare(task: str) -> None:
    """Write the task's model and the problems where they are not there."""
    model = FOLDER / f"{task}_model"
    if not (model / "tokenizer.json").exists():
        if task == "sums":
            for part in load_shipped():
                part.save_pretrained(model)
        else:
            {"long": make_long, "misled": make_misled}[task](model)
    rows = []
    for problem in random_problems(HELD_OUT + 640):
        prompt = [{"role": "user", "content": problem.text}]
        rows.append(json.dumps({"prompt": prompt, "answer": str(problem.answer)}))
    (FOLDER / "held_out.jsonl").write_text("\n".join(rows[:HELD_OUT]))
    (FOLDER / "train.jsonl").write_text("\n".join(rows[HELD_OUT:]))


def fit_of(task: str) -> Path:
    """The file of the method fitted, by the values of 128 other problems' steps under the model that training starts from."""
    folder = FOLDER / f"{task}_fit"
    fit = folder / "fitted.json"
    if not fit.exists():
        folder.mkdir(exist_ok=True)
        sampled = f"{folder}/own.jsonl"
        values = f"{folder}/values.jsonl"
        model = f"--model {FOLDER}/{task}_model"
        rollouts = f"{model} --length {TASKS[task].tokens} --reward {REWARD} --device cpu"
        commands = [
            f"bench sample sums {sampled} {rollouts} --problems 128",
            f"bench values {sampled} {values} {rollouts} --separator ;",
            f"grail_advantage.analyze {values} {model} --method entropy --out {folder}/analysis",
            f"bench fit {folder}/analysis {fit}",
        ]
        for command in commands:
            subprocess.run([sys.executable, "-m", *command.split()], check=True)
    return fit


def accuracy(run: Run) -> float:
    """The mean of its evaluations after step 0."""
    by_step = read_run(run.folder)[METRIC]
    return statistics.fmean(value for step, value in by_step.items() if step)


def best_rate(task: str, arms: Sequence[str]) -> str:
    """The learning rate that all arms take: of the sweep's, that with the highest mean accuracy."""

    def mean(rate: str) -> float:
        return statistics.fmean(accuracy(Run(task, arm, SWEEP_SEED, rate)) for arm in arms)

    return max(TASKS[task].rates, key=mean)


def planned(task: str, arms: Sequence[str], seeds: int, rate: str) -> Iterator[Run]:
    """The runs in the plan's order. Without a rate the first two arms choose it, when their sweep has ended."""
    if not rate:
        for candidate in TASKS[task].rates:
            for arm in arms[:2]:
                yield Run(task, arm, SWEEP_SEED, candidate)
        rate = best_rate(task, arms[:2])
        print(f"{task}: learning rate {rate}", flush=True)
    for seed in range(seeds):
        for arm in arms:
            if arm != "stock" or seed in STOCK_SEEDS:
                yield Run(task, arm, seed, rate)


def train(run: Run) -> None:
    """Train in this process, with what it says in the folder's log."""
    # trl_grail refuses a folder with the figures of a run, here of one that broke off.
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    method = ARMS[run.arm].format(fit=FOLDER / f"{run.task}_fit/fitted.json")
    data = f"--model {FOLDER}/{run.task}_model --data {FOLDER}/train.jsonl --held-out {FOLDER}/held_out.jsonl"
    training = f"--max-response {TASKS[run.task].tokens} --learning-rate {run.rate} --seed {run.seed} --output {run.folder}"
    sys.argv = ["trl_grail.py", *f"{method} {data} {SIZE} {EVALUATION} {training}".split()]
    with (run.folder / "log.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        trl_grail.main()


def log_probs_of(model: torch.nn.Module, rows: Sequence[DumpRow]) -> list[torch.Tensor]:
    """The log-probabilities of the rows' responses, read side by side: padded on the right."""
    longest = max(len(row.prompt_ids) + len(row) for row in rows)
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids = [*row.prompt_ids, *row.token_ids_T]
        ids_BL[index, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        logits_BLV = model(ids_BL).logits
    # A bfloat16 model's logits become float32, as in training.
    dtype = torch.promote_types(logits_BLV.dtype, torch.float32)
    log_probs_BLV = logits_BLV.to(dtype).log_softmax(-1)
    chosen_BL = log_probs_BLV[:, :-1].gather(-1, ids_BL[:, 1:, None])[..., 0]
    starts = [len(row.prompt_ids) - 1 for row in rows]
    return [
        chosen_BL[index, start : start + len(row)]
        for index, (start, row) in enumerate(zip(starts, rows, strict=True))
    ]


def print_effects(task: str, arms: Sequence[str], seeds: int) -> None:
    """Print, by the tokens' probability before the update, how often those with an advantage moved with it, and beside
    their median change what one forward of the first model rounds."""
    folder = FOLDER / f"{task}_model"
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    lines = []
    for arm in arms:
        folders = [Run(task, arm, seed, "").folder / "tokens" for seed in range(seeds)]
        rows = [row for folder in folders for row in read_dump(folder)]
        measured = [row for row in rows if row.effect_T is not None]
        joined: Callable[[str], np.ndarray] = partial(_joined, measured)
        columns = [joined(name) for name in ("advantage_T", "effect_T", "mask_T", "old_log_prob_T")]
        # All tokens as one row of the four arguments
        figures = effect_figures(*(torch.from_numpy(values_N)[None] for values_N in columns))
        advantage_N, effect_N, mask_N, log_prob_N = columns
        probability_N = np.exp(log_prob_N)
        credited_N = mask_N & (advantage_N != 0) & np.isfinite(effect_N)
        size_N = np.where(credited_N, abs(effect_N), 0.0)
        exact_N, *rounded = [torch.cat(log_probs_of(model, measured)).numpy() for model in models]
        # How far each log-probability is from that of the same weights in float64
        roundings = [abs(log_probs_N - exact_N) for log_probs_N in rounded]
        for name, (low, high) in PROBABILITIES.items():
            part_N = credited_N & (probability_N > low) & (probability_N <= high)
            if not part_N.any():
                continue
            shares = [
                part_N.sum() / credited_N.sum(),
                size_N[part_N].sum() / size_N.sum(),
                figures[f"moved_with_advantage_{name}"],
            ]
            cells = [f"{share:.2f}" for share in shares]
            cells += [f"{np.median(values_N[part_N]):.1g}" for values_N in (size_N, *roundings)]
            lines.append([arm, f"{low} to {min(high, 1)}", *cells])
        by_size = f"{figures['moved_with_advantage_weighted']:.2f} by size"
        rate = f"{figures['moved_with_advantage_rate']:.2f}"
        lines.append([arm, "all", str(credited_N.sum()), by_size, rate, *[""] * 3])
    names = [
        "tokens",
        "of the change",
        "with the advantage",
        "median change",
        "float32 rounds",
        "bfloat16",
    ]
    print(*table(["arm", "probability", *names], lines, right=2), sep="\n")


def _joined(rows: Sequence[DumpRow], name: str) -> np.ndarray:
    return np.concatenate([getattr(row, name) for row in rows])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=FIVE)
    parser.add_argument("--seeds", type=int, default=6, help="their number (default: %(default)s)")
    parser.add_argument(
        "--rate", default="", help="the learning rate, in place of a sweep by the first two arms"
    )
    parser.add_argument("--effects", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if options.effects:
        # TRL's own trainer writes no dump.
        arms = [arm for arm in options.arms if arm != "stock"]
        print_effects(options.task, arms, options.seeds)
        return
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepare(options.task)
    if any("{fit}" in ARMS[arm] for arm in options.arms):
        fit_of(options.task)
    import trl.trainer.grpo_trainer  # noqa: F401, once for all runs, which are copies of this process

    processes = multiprocessing.get_context("fork")
    for run in planned(options.task, options.arms, options.seeds, options.rate):
        if not (run.folder / "trainer_state.json").exists():
            process = processes.Process(target=train, args=(run,))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"five_arms: {run.folder} failed; its log.txt says why")
        print(f"{run.folder}: {accuracy(run):.3f}", flush=True)


if __name__ == "__main__":
    main()
