"""What a step of TRL's GRPO costs with GRAIL: whole steps, generation included, beside the stock trainer's.

    PYTHONPATH=.venv/trl:. .venv/bin/python -m benchmarks.bench_trl [--repeats 5]

The model is the SFT-initialised one of the CPU example, which generates with the same seed in every variant. Rewards are
given by plan, so that each variant has the named share of responses with a score; SGD with a learning rate of 0 updates.
All of it runs in float32, and again with ``bf16=True``, TRL's default. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks import timer
from grail_advantage import Grail
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import problems

PROMPTS = 8
ROLLOUTS = 8
MICRO_BATCH = 16
LONGEST = 128


GRAIL = {"token_weights": Grail()}
VARIANTS: dict[str, tuple[dict[str, Any], float, bool]] = {
    "stock": ({}, 0.5, False),
    "GRAIL scores 25 %": (GRAIL, 0.25, False),
    "50 %": (GRAIL, 0.5, False),
    "100 %": ({"token_weights": Grail(gate="all")}, 0.5, False),
    "half have the advantage 0, 25 % are scored": (GRAIL, 0.5, True),
    "the same with skip_zero_advantage": ({**GRAIL, "skip_zero_advantage": True}, 0.5, True),
}
"""Options of the trainer; the share of incorrect responses; whether every other prompt has no incorrect ones."""


def make_trainer(variant: str, folder: str, bf16: bool) -> tuple[GRPOTrainer, list[dict[str, Any]]]:
    """The trainer of a variant, ready for a step, and the rows of its batch."""
    options, wrong, agreed = VARIANTS[variant]
    model, tokenizer = load_shipped()
    rows = [
        {"prompt": [{"role": "user", "content": problem.text}]}
        for problem in problems("train", PROMPTS)
    ]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        places = (divmod(place, ROLLOUTS) for place in range(len(completions)))
        return [float(at >= wrong * ROLLOUTS or (agreed and prompt % 2)) for prompt, at in places]

    config = GRPOConfig(
        folder,
        num_generations=ROLLOUTS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * ROLLOUTS // MICRO_BATCH,
        max_completion_length=LONGEST,
        gradient_checkpointing=False,
        loss_type="dr_grpo",
        scale_rewards="none",
        learning_rate=0.0,
        optim="sgd",
        use_cpu=True,
        bf16=bf16,
        report_to="none",
    )
    trainer_class = TokenWeightGRPOTrainer if options else GRPOTrainer
    dataset = Dataset.from_list(rows)
    trainer = trainer_class(
        model, reward, config, processing_class=tokenizer, train_dataset=dataset, **options
    )
    # As train() does before its first step.
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer.create_optimizer()
    return trainer, [row for row in rows for _ in range(ROLLOUTS)]


def run_step(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> None:
    """Generation, weights and update."""
    torch.manual_seed(0)
    for _ in range(trainer.args.gradient_accumulation_steps):
        trainer.training_step(trainer.model, rows, None)
    trainer.optimizer.step()
    trainer.model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    origin = timer.origin("cpu", f"python -m benchmarks.bench_trl {' '.join(sys.argv[1:])}")
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in VARIANTS}
    for precision in ("float32", "bf16"):
        AcceleratorState._reset_state()  # of a process, precision included
        with tempfile.TemporaryDirectory() as folder:
            trainers = {name: make_trainer(name, folder, precision == "bf16") for name in VARIANTS}
            timed = {
                name: partial(timer.seconds, "cpu", partial(run_step, trainer, rows))
                for name, (trainer, rows) in trainers.items()
            }
            repeats = timer.in_turn(timed, options.repeats)
        for name, seconds in repeats.items():
            pairs = zip(seconds, repeats["stock"], strict=True)
            figures[name][f"{precision}, x stock"] = [value / stock for value, stock in pairs]
    print(origin, "", *timer.table(figures), sep="\n")


if __name__ == "__main__":
    main()
