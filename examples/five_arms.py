"""What does GRAIL's change do? Five arms with the small model: docs/credit.md has the plan, and the table.

    PYTHONPATH=.venv/trl python -m examples.five_arms [sums|long]    runs that outputs/five_arms lacks, in the plan's order
    python -m grail_advantage.compare outputs/five_arms/sums/grail/seed* --against outputs/five_arms/sums/uniform/seed*

A run is ``examples/trl_grail.py`` in a process of its own. One that has ended is not repeated, one that broke off is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch

from examples import trl_grail
from grail_advantage.compare import read_run
from verl_cpu.tiny.make_models import make_long
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
}
SEEDS = range(6)
STOCK_SEEDS = (0, 1)  # it is to be uniform to the bit
TASKS = {"sums": MAX_RESPONSE_TOKENS, "long": MAX_LONG_TOKENS}  # tokens of a response at most
# Each task's learning rates to choose from, by a sweep of its own
RATES = {"sums": ("1e-4", "3e-4", "1e-3"), "long": ("5e-5", "1e-4", "2e-4")}
SWEEP_SEED = 100
SWEEP_ARMS = ("uniform", "grail")
HELD_OUT = 256
SIZE = "--prompts 8 --rollouts 8 --micro-batch 64 --lora-rank 0 --steps 16 --save-steps 0 --no-bf16"
EVALUATION = "--eval-every 8 --dump-every 8 --effect-every 8"
METRIC = "eval_reward"


class Run(NamedTuple):
    task: str
    arm: str
    seed: int
    rate: str

    @property
    def folder(self) -> Path:
        parts = ("rates", self.rate) if self.seed == SWEEP_SEED else ()
        return FOLDER.joinpath(self.task, *parts, self.arm, f"seed{self.seed}")


def prepare() -> None:
    """Write the models and the problems that are not there."""
    if not (FOLDER / "long_model" / "tokenizer.json").exists():
        make_long(FOLDER / "long_model")
    for part in load_shipped():
        part.save_pretrained(FOLDER / "sums_model")
    rows = []
    for problem in random_problems(HELD_OUT + 640):
        prompt = [{"role": "user", "content": problem.text}]
        rows.append(json.dumps({"prompt": prompt, "answer": str(problem.answer)}))
    (FOLDER / "held_out.jsonl").write_text("\n".join(rows[:HELD_OUT]))
    (FOLDER / "train.jsonl").write_text("\n".join(rows[HELD_OUT:]))


def accuracy(run: Run) -> float:
    """The mean of its evaluations after step 0."""
    by_step = read_run(run.folder)[METRIC]
    return statistics.fmean(value for step, value in by_step.items() if step)


def best_rate(task: str) -> str:
    """The learning rate that all arms take: of the sweep's, that with the highest mean accuracy."""

    def mean(rate: str) -> float:
        return statistics.fmean(accuracy(Run(task, arm, SWEEP_SEED, rate)) for arm in SWEEP_ARMS)

    return max(RATES[task], key=mean)


def planned(tasks: Sequence[str]) -> Iterator[Run]:
    """The runs in the plan's order; a task's rate is chosen when its sweep has ended."""
    for task in tasks:
        for rate in RATES[task]:
            for arm in SWEEP_ARMS:
                yield Run(task, arm, SWEEP_SEED, rate)
        rate = best_rate(task)
        print(f"{task}: learning rate {rate}", flush=True)
        for seed in SEEDS:
            for arm in ARMS:
                if arm != "stock" or seed in STOCK_SEEDS:
                    yield Run(task, arm, seed, rate)


def train(run: Run) -> None:
    """Train in this process, with what it says in the folder's log."""
    # trl_grail refuses a folder with the figures of a run, here of one that broke off.
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    data = f"--model {FOLDER}/{run.task}_model --data {FOLDER}/train.jsonl --held-out {FOLDER}/held_out.jsonl"
    training = f"--max-response {TASKS[run.task]} --learning-rate {run.rate} --seed {run.seed} --output {run.folder}"
    sys.argv = ["trl_grail.py", *f"{ARMS[run.arm]} {data} {SIZE} {EVALUATION} {training}".split()]
    with (run.folder / "log.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        trl_grail.main()


def main() -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepare()
    import trl.trainer.grpo_trainer  # noqa: F401, once for all runs, which are copies of this process

    processes = multiprocessing.get_context("fork")
    for run in planned(sys.argv[1:] or list(TASKS)):
        if not (run.folder / "trainer_state.json").exists():
            process = processes.Process(target=train, args=(run,))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"five_arms: {run.folder} failed; its log.txt says why")
        print(f"{run.folder}: {accuracy(run):.3f}", flush=True)


if __name__ == "__main__":
    main()
