"""What a step of TRL's GRPO costs with GRAIL: whole steps, generation included, beside the stock trainer's.

TRL has an environment of its own (requirements-trl.txt):

    PYTHONPATH=.venv/trl:. .venv/bin/python -m benchmarks.bench_trl small
    PYTHONPATH=.venv/trl:. .venv/bin/python -m benchmarks.bench_trl smollm2 --model FOLDER --data gsm8k_test.jsonl

Every variant generates with the same seed. ``small`` is the SFT-initialised model of the CPU example, and trains on what it
generates; with ``smollm2`` the solutions of GSM8K take the place of what is generated, since this model rarely boxes an
answer. Rewards are given by plan, so that each variant has the named share of responses with a score; SGD with a learning
rate of 0 updates. All of it runs in float32, and again with ``bf16=True``, TRL's default. FOLDER holds what
:func:`verl_cpu.tiny.smollm2.load_smollm2` gives in the other environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks import timer
from grail_advantage import Grail
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import problems


class Size(NamedTuple):
    """Of a step; ``response``: most tokens."""

    prompts: int
    rollouts: int
    micro_batch: int
    response: int


class Worked(NamedTuple):
    """A problem of GSM8K and its solution, which ends in a box."""

    text: str
    solution: str


def worked_problem(line: str) -> Worked:
    """Of a line of JSON."""
    row = json.loads(line)
    steps, _, answer = (part.strip() for part in row["answer"].rpartition("####"))
    solution = re.sub(r"<<.*?>>", "", f"{steps}\nThe answer is \\boxed{{{answer}}}.")
    return Worked(f"{row['question']}\nReason step by step, and put your final answer within \\boxed{{}}.", solution)


class Variant(NamedTuple):
    """How a step is run: GRAIL's gate (``None``: the stock trainer), the share of incorrect responses, whether every other
    prompt has correct responses alone, which have no advantage, and whether those are left out."""

    gate: str | None = "wrong"
    wrong: float = 0.5
    agreed: bool = False
    skip: bool = False


SIZES = {"small": Size(8, 8, 16, 128), "smollm2": Size(2, 4, 4, 64)}
STOCK = "stock"
VARIANTS = {
    STOCK: Variant(gate=None),
    "GRAIL, 25 %": Variant(wrong=0.25),
    "GRAIL, 50 %": Variant(),
    "GRAIL, 100 %": Variant(gate="all"),
    "GRAIL, 50 % zero-advantage": Variant(agreed=True),
    "GRAIL, 50 % zero-advantage, without them": Variant(agreed=True, skip=True),
}


class Steps:
    """A trainer that runs one step at a time."""

    def __init__(
        self, size: Size, variant: Variant, folder: str, model_folder: Path | None, data: Path | None, bf16: bool
    ) -> None:
        if model_folder is None:
            model, tokenizer = load_shipped()
        else:
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(model_folder)
        worked = [worked_problem(line) for line in data.read_text(encoding="utf-8").splitlines()] if data else []
        short = [one for one in worked if len(tokenizer.encode(one.solution)) < size.response][: size.prompts]
        asked = short or problems("train", size.prompts)
        self.rows = [{"prompt": [{"role": "user", "content": one.text}]} for one in asked for _ in range(size.rollouts)]
        written = [
            [*tokenizer.encode(one.solution), tokenizer.eos_token_id] for one in short for _ in range(size.rollouts)
        ]

        def reward(completions: list[Any], **_: Any) -> list[float]:
            places = [divmod(place, size.rollouts) for place in range(len(completions))]
            right = [rollout >= variant.wrong * size.rollouts for _, rollout in places]
            return [float(ok or (variant.agreed and prompt % 2)) for ok, (prompt, _) in zip(right, places, strict=True)]

        class Written:
            """Gives the written solutions back in place of what is generated."""

            def _generate_single_turn(self, *arguments: Any, **named: Any) -> tuple[list[list[int]], Any]:
                generated, others = super()._generate_single_turn(*arguments, **named)
                return written or generated, others

        config = GRPOConfig(
            folder,
            num_generations=size.rollouts,
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=len(self.rows) // size.micro_batch,
            max_completion_length=size.response,
            gradient_checkpointing=False,
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=0.0,
            optim="sgd",
            use_cpu=True,
            bf16=bf16,
            report_to="none",
        )
        named = {"reward_funcs": reward, "args": config, "processing_class": tokenizer}
        named["train_dataset"] = Dataset.from_list(self.rows[:: size.rollouts])
        if variant.gate is not None:
            named |= {"token_weights": Grail(gate=variant.gate), "skip_zero_advantage": variant.skip}
        base = GRPOTrainer if variant.gate is None else TokenWeightGRPOTrainer
        self.trainer = type("Trainer", (Written, base), {})(model, **named)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        self.trainer.create_optimizer()

    def run(self) -> None:
        """Generation, weights and update."""
        torch.manual_seed(0)
        for _ in range(self.trainer.args.gradient_accumulation_steps):
            self.trainer.training_step(self.trainer.model, self.rows, None)
        self.trainer.optimizer.step()
        self.trainer.model.zero_grad()

    def timed(self) -> dict[str, float]:
        """Seconds of a step, and of the weights in it."""
        step = timer.seconds("cpu", self.run)
        return {"step": round(step, 3), "weights": round(self.figure("grail/seconds") or 0.0, 3)}

    def figure(self, name: str) -> float | None:
        """The latest of TRL's logs."""
        return (self.trainer._metrics["train"].get(name) or [None])[-1]

    def peaks(self) -> dict[str, int]:
        """Most bytes that torch holds in a micro-batch's forward and backward, and in the pass of the weights."""
        trainer = self.trainer
        output = GRPOTrainer._generate_and_score_completions(trainer, self.rows)
        size = trainer.args.per_device_train_batch_size
        part = {name: values[:size] if getattr(values, "ndim", 0) else values for name, values in output.items()}
        part["advantages"] = part["advantages"][:, None]  # one a token, as the loss takes them
        ways = {"update": lambda: trainer.compute_loss(trainer.model, part).backward()}
        if isinstance(trainer, TokenWeightGRPOTrainer):
            ways["pass"] = lambda: trainer._weighted_advantages(self.rows, output)
        found = {}
        for name, way in ways.items():
            trainer.model.zero_grad()
            found[name] = timer.peak_memory("cpu", way)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, help="smollm2's folder")
    parser.add_argument("--data", type=Path, help="GSM8K's test rows, for smollm2")
    parser.add_argument("--results", type=Path, default=timer.RESULTS, help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    result = timer.record(f"trl_{options.set}", "cpu", f"python -m benchmarks.bench_trl {' '.join(sys.argv[1:])}")
    size = SIZES[options.set]
    for precision in ("float32", "bf16"):
        AcceleratorState._reset_state()  # of a process, precision included
        with tempfile.TemporaryDirectory() as folder:
            given = (folder, options.model, options.data, precision == "bf16")
            steps = {name: Steps(size, of, *given) for name, of in VARIANTS.items()}
            repeats = list(timer.in_turn({name: of.timed for name, of in steps.items()}, options.repeats))
            found: dict[str, Any] = {"repeats": repeats}
            for name, of in steps.items():
                parts = timer.ratios(repeats, name, STOCK, lambda seconds: seconds["step"])
                quickest = [min(repeat[which]["step"] for repeat in repeats) for which in (name, STOCK)]
                found[name] = {"median": round(median(parts), 3), "quickest": round(quickest[0] / quickest[1], 3)}
                found[name]["selected"] = of.figure("grail/selected_rate")
                timer.show(f"{precision}, {name}: {found[name]}")
            result[precision] = found | {"memory": {name: steps[name].peaks() for name in (STOCK, "GRAIL, 100 %")}}
    timer.write(result | {"rows": size.prompts * size.rollouts}, options.results)


if __name__ == "__main__":
    main()
