"""What a step of TRL's GRPO costs with GRAIL: whole steps, generation included, one after the other beside the stock trainer's.

TRL has an environment of its own (requirements-trl.txt):

    PYTHONPATH=.venv/trl:. .venv/bin/python -m benchmarks.bench_trl small
    PYTHONPATH=.venv/trl:. .venv/bin/python -m benchmarks.bench_trl smollm2 --model FOLDER --data gsm8k_test.jsonl

Every way generates with the same seed. ``small`` is the SFT-initialised model of the CPU example, and trains on what it
generates; with ``smollm2`` the solutions of GSM8K take the place of what is generated, since this model rarely boxes an
answer. Rewards are given by plan, so that each way has the named share of responses with a score; SGD with a
learning rate of 0 updates. FOLDER holds what :func:`verl_cpu.tiny.smollm2.load_smollm2` gives in the other environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks import measuring
from benchmarks.gpu_check.smollm2 import problem
from grail_advantage import Grail
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import problems


@dataclass(frozen=True)
class Set:
    """A model and the size of a step."""

    prompts: int
    rollouts: int
    micro_batch: int
    response: int
    """Most tokens."""


SETS = {"small": Set(8, 8, 16, 128), "smollm2": Set(2, 4, 4, 64)}


@dataclass(frozen=True)
class Way:
    """How a step is run."""

    wrong: float = 0.5
    """Share of the responses to a prompt; the others are correct."""
    gate: str | None = "wrong"
    """GRAIL's; ``None``: the stock trainer."""
    agreed: bool = False
    """Every other prompt has correct responses alone, which have no advantage."""
    skip: bool = False


WAYS = {
    "stock": Way(gate=None),
    "GRAIL, 25 %": Way(wrong=0.25),
    "GRAIL, 50 %": Way(),
    "GRAIL, 100 %": Way(gate="all"),
    "GRAIL, 50 % zero-advantage": Way(agreed=True),
    "GRAIL, 50 % zero-advantage, without them": Way(agreed=True, skip=True),
}


class OneStepTrainer:
    """A trainer that runs one step at a time."""

    def __init__(self, chosen: Set, way: Way, folder: Path, options: argparse.Namespace) -> None:
        model, tokenizer = load(options.model)
        data = options.data
        worked = (
            [problem(line, True) for line in data.read_text(encoding="utf-8").splitlines()] if data is not None else []
        )
        solutions = {one.text: one.solution for one in worked if len(tokenizer.encode(one.solution)) < chosen.response}
        questions = list(solutions)[: chosen.prompts] or [problem.text for problem in problems("train", chosen.prompts)]
        self.rows = [
            {"prompt": [{"role": "user", "content": question}]}
            for question in questions
            for _ in range(chosen.rollouts)
        ]

        def reward(completions: list[Any], **_: Any) -> list[float]:
            places = range(len(completions))
            agreed = [way.agreed and place // chosen.rollouts % 2 == 1 for place in places]
            return [float(agreed[place] or place % chosen.rollouts >= way.wrong * chosen.rollouts) for place in places]

        config = GRPOConfig(
            str(folder),
            num_generations=chosen.rollouts,
            per_device_train_batch_size=chosen.micro_batch,
            gradient_accumulation_steps=chosen.prompts * chosen.rollouts // chosen.micro_batch,
            max_completion_length=chosen.response,
            gradient_checkpointing=options.checkpointing,
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=0.0,
            optim="sgd",
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        written = [solutions[question] for question in questions for _ in range(chosen.rollouts)] if solutions else []

        class Written:
            """Gives the written solutions back in place of what is generated."""

            def _generate_single_turn(self, *arguments: Any, **named: Any) -> tuple[list[list[int]], Any]:
                generated, others = super()._generate_single_turn(*arguments, **named)
                ends = [tokenizer.eos_token_id]
                return [tokenizer.encode(text) + ends for text in written] or generated, others

        named = dict(reward_funcs=reward, args=config, processing_class=tokenizer)
        named["train_dataset"] = Dataset.from_list(self.rows[:: chosen.rollouts])
        if way.gate is None:
            self.trainer = type("Stock", (Written, GRPOTrainer), {})(model, **named)
        else:
            weighted = type("Weighted", (Written, TokenWeightGRPOTrainer), {})
            signal = Grail(gate=way.gate)
            skipping = {"skip_zero_advantage": True} if way.skip else {}
            self.trainer = weighted(model, token_weights=signal, **skipping, **named)
        self.trainer.model.train()
        if options.checkpointing:  # as Trainer.train() does
            self.trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        self.trainer.create_optimizer()

    def run(self) -> None:
        """Generation, weights and update."""
        torch.manual_seed(0)
        trainer = self.trainer
        for _ in range(trainer.args.gradient_accumulation_steps):
            trainer.training_step(trainer.model, self.rows, None)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    def figure(self, name: str) -> float | None:
        """The latest of TRL's logs."""
        return (self.trainer._metrics["train"].get(name) or [None])[-1]

    def peaks(self) -> dict[str, int]:
        """Most bytes that torch holds in a micro-batch's forward and backward, and in the pass of the weights."""
        trainer = self.trainer
        output = GRPOTrainer._generate_and_score_completions(trainer, self.rows)
        size = trainer.args.per_device_train_batch_size
        part = {name: values[:size] if getattr(values, "ndim", 0) else values for name, values in output.items()}
        trainer.model.zero_grad()
        peaks = {"update": measuring.peak_memory("cpu", lambda: trainer.compute_loss(trainer.model, part).backward())}
        trainer.model.zero_grad()
        if hasattr(trainer, "signal"):
            peaks["pass"] = measuring.peak_memory("cpu", lambda: trainer._weighted_advantages(self.rows, output))
        return peaks


def load(folder: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model of a folder, or that of the CPU example."""
    if folder is None:
        return load_shipped()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def measure(chosen: Set, ways: Mapping[str, Way], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every way's steps and of the weights in them."""
    clock = measuring.Clock("cpu")
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: OneStepTrainer(chosen, way, Path(folder), options) for name, way in ways.items()}

        def timed(step: OneStepTrainer) -> dict[str, float]:
            return {"step": clock.seconds(step.run), "weights": step.figure("grail/seconds") or 0.0}

        ways_to_run = {name: (lambda step=step: timed(step)) for name, step in steps.items()}
        runs = measuring.in_turn(ways_to_run, warm=not options.cold)
        results: dict[str, Any] = {name: {"step": [], "weights": []} for name in steps}
        for repeat in range(options.repeats):
            for name, seconds in next(runs).items():
                for kind, value in seconds.items():
                    results[name][kind].append(round(value, 3))
            measuring.show(f"repeat {repeat + 1} of {options.repeats}: {ratios(results)}")
        for name, step in steps.items():
            results[name]["selected"] = step.figure("grail/selected_rate")
        results["memory"] = {"stock": steps["stock"].peaks(), "GRAIL, 100 %": steps["GRAIL, 100 %"].peaks()}
        results["rows"] = len(steps["stock"].rows)
    return results


def ratios(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Each way's steps as a part of the stock trainer's: the quickest by the quickest, and the median of the repeats."""
    found = {}
    stock = results["stock"]["step"]
    for name in set(WAYS) & set(results) - {"stock"}:
        own = results[name]["step"]
        parts = [seconds / of_stock for seconds, of_stock in zip(own, stock, strict=True)]
        found[name] = {"quickest": round(min(own) / min(stock), 3), "median": round(statistics.median(parts), 3)}
    return {name: found[name] for name in WAYS if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="without a first step that is not counted")
    parser.add_argument("--model", type=Path, help="smollm2's folder")
    parser.add_argument("--data", type=Path, help="GSM8K's test rows, for smollm2")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, TRL's default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--output-dir", type=Path, default=measuring.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    clock = measuring.Clock("cpu")
    name = f"trl_{options.set}{'_checkpointing' if options.checkpointing else ''}"
    result = measuring.record(name, clock, f"python -m benchmarks.bench_trl {' '.join(sys.argv[1:])}")
    ways = {name: WAYS[name] for name in options.ways}
    measured = measure(SETS[options.set], ways, options)
    measuring.write(result | {"ratios": ratios(measured), **measured}, options.output_dir)


if __name__ == "__main__":
    main()
