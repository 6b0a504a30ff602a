"""GRAIL in TRL | Qwen3-1.7B with LoRA | one GPU with 24 GB | GSM8K

    pip install -e '.[trl]'                                          in the repository; all that this file imports
    python examples/trl_grail.py                                     model and data from the hub
    python examples/trl_grail.py --data my.jsonl --model my_model    a .jsonl, .parquet or .csv file, or a hub name
    python examples/trl_grail.py --tiny                              0.65 M parameters on sums: no GPU, no hub

A row has a question, as ``question``, ``problem`` or ``prompt`` (a text, or messages that ask for a box already), and
its answer, as ``answer`` (of which the part after ``####`` counts), ``solution``, or verl's ``reward_model``.

On a GPU three steps of a small model ran so far (docs/gpu.md). Most of a step is generation by transformers, at about
0.1 s a token of 64 responses: 1024 tokens should take two minutes, and 200 steps six hours.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from grail_advantage.analyze.lines import json_lines
from grail_advantage.analyze.methods import parse_method
from grail_advantage.dump import write_whole
from grail_advantage.method import Control
from grail_advantage.reward import check_ground_truths, compute_score, gold_text
from grail_advantage.text_io import read_bytes, read_json, why

if TYPE_CHECKING:
    from datasets import Dataset

    from grail_advantage.method import BaseMethod

NUMBERS = {
    "prompts": 8,
    "rollouts": 8,
    "micro_batch": 4,
    "max_response": 1024,
    "lora_rank": 32,
    "steps": 200,
    "eval_every": 20,
    "dump_every": 10,
    "save_steps": 50,
    "learning_rate": 1e-5,
    "seed": 0,
    "effect_every": 0,
}
"""For 24 GB. An update has prompts x rollouts responses, micro_batch at a time; save_steps 0: no checkpoint;
effect_every: steps between measurements of what the update changed, in steps that are dumped; 0: none."""
TINY = {
    "prompts": 16,
    "micro_batch": 128,
    "max_response": 64,
    "lora_rank": 0,
    "steps": 16,
    "eval_every": 4,
    "dump_every": 4,
    "save_steps": 8,
    "learning_rate": 3e-4,
}
ASK = "Reason step by step, and put your final answer within \\boxed{}."
MAY_CHANGE = {
    "steps",
    "eval_every",
    "dump_every",
    "effect_every",
    "save_steps",
    "report_to",
    "held_out",
    "vllm",
    "output",
    "resume",
}
"""Options that a run which resumes may change; the others decide what it trains."""
OPTIONS = "options.json"  # in the output's folder
STOCK = "none"  # as --method: TRL's own trainer


def main() -> None:
    options = parse_options()
    try:
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer

        from grail_advantage.trl_ext import TokenWeightGRPOTrainer
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"trl_grail: {error}; see this file's first lines, or set PYTHONPATH=.venv/trl"
        ) from error
    output = options.output
    responses = options.prompts * options.rollouts
    checkpoint = last_checkpoint(output) if options.resume else None
    if options.resume and checkpoint is None:
        raise SystemExit(
            f"trl_grail: {output} has no whole checkpoint to resume from; leave out --resume"
        )
    if not options.resume and (output / "metrics.jsonl").exists():
        raise SystemExit(
            f"trl_grail: {output} has a run, which a new one would replace; use --resume or --output"
        )
    keep_options(options)
    if options.tiny:
        make_tiny(options)
    # It is compiled at run time, often without an nvcc
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    config = GRPOConfig(
        str(output),
        seed=options.seed,
        # An update's responses, and the loss
        num_generations=options.rollouts,
        max_completion_length=options.max_response,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=responses // options.micro_batch,
        max_steps=options.steps,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        epsilon_high=0.28,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        # The model and its memory
        bf16=options.bf16,
        gradient_checkpointing=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={
            "dtype": "bfloat16" if options.bf16 and options.lora_rank else "float32"
        },
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        chat_template_kwargs={"enable_thinking": False},
        # Evaluation, logs and checkpoints
        eval_strategy="steps" if options.held_out else "no",
        eval_steps=options.eval_every,
        eval_on_start=bool(options.held_out),
        per_device_eval_batch_size=options.micro_batch,  # its loss has all logits at once, as a training step's
        num_generations_eval=1,
        logging_steps=1,
        report_to=options.report_to,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 1,
        save_total_limit=2,
    )
    adapter = None
    if options.lora_rank:
        adapter = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank,
        )
    weights = {}
    if options.method != STOCK:
        weights = {
            "token_weights": method_of(options),
            "token_dump": {
                "folder": output / "tokens",
                "every": options.dump_every,
                "effect_every": options.effect_every,
            },
        }
    trainer_class = TokenWeightGRPOTrainer if weights else GRPOTrainer
    trainer = trainer_class(
        options.model,
        reward,
        config,
        train_dataset=problems(options.data),
        eval_dataset=problems(options.held_out) if options.held_out else None,
        peft_config=adapter,
        **weights,
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        judged = [
            entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry
        ]
        if judged:
            print(
                f"Share of held-out problems answered correctly: {judged[0]:.2f} before, {judged[-1]:.2f} after"
            )
        if any((output / "tokens").glob("step_*.parquet")):
            print(f"Every token's weight, in one page: python -m grail_advantage.report {output}")


def method_of(options: argparse.Namespace) -> BaseMethod:
    """ValueError: there is no such method, or option."""
    spec = options.method
    if options.control != "none":
        spec += f"{',' if ':' in spec else ':'}control={options.control}"
    return parse_method(spec)


def last_checkpoint(output: Path) -> Path | None:
    """The last whole checkpoint: of one, transformers writes ``trainer_state.json`` last."""
    steps = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in output.glob("checkpoint-[0-9]*")
    }
    for step in sorted(steps, reverse=True):
        try:
            read_json(read_bytes(steps[step] / "trainer_state.json"))
        except (OSError, ValueError) as error:
            print(
                f"trl_grail: {steps[step]} is not whole ({why(error)}); looking for the one before",
                file=sys.stderr,
            )
        else:
            return steps[step]
    return None


def keep_options(options: argparse.Namespace) -> None:
    """Store what decides the training in the output's folder, or refuse to resume with something else (SystemExit)."""
    path = options.output / OPTIONS
    now = {name: value for name, value in vars(options).items() if name not in MAY_CHANGE}
    if options.resume and path.is_file():
        begun = read_json(read_bytes(path))
        differing = [
            f"--{name.replace('_', '-')} {begun.get(name)}"
            for name in now
            if begun.get(name) != now[name]
        ]
        if differing:
            raise SystemExit(
                f"trl_grail: {options.output} was begun with {', '.join(differing)}; use that or --output"
            )
    write_whole(path, json.dumps(now, indent=1))


def make_tiny(options: argparse.Namespace) -> None:
    """Write the tiny model and its problems, and name them in the options."""
    # It need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/verl-cpu"))
    from verl_cpu.tiny.shipped import load_shipped
    from verl_cpu.tiny.task import random_problems

    lines = []
    for chain in random_problems(768):
        prompt = [{"role": "user", "content": chain.text}]
        lines.append(json.dumps({"prompt": prompt, "answer": str(chain.answer)}))
    for part in load_shipped():
        part.save_pretrained(options.output / "tiny")
    options.model = str(options.output / "tiny")
    options.held_out = str(options.output / "held_out.jsonl")
    options.data = str(options.output / "train.jsonl")
    Path(options.held_out).write_text("\n".join(lines[:128]), encoding="utf-8")
    Path(options.data).write_text("\n".join(lines[128:]), encoding="utf-8")


def problems(source: str) -> Dataset:
    """Prompts, as messages, and solutions, from a file or from the hub, without rows whose answer cannot be used."""
    from datasets import Dataset

    rows = read_rows(source)
    unusable = set(check_ground_truths(map(answer, rows), source))
    return Dataset.from_list(
        [problem(row) for number, row in enumerate(rows) if number not in unusable]
    )


def read_rows(source: str) -> Sequence[dict[str, Any]]:
    """The rows of a file, with its texts as they are: ``load_dataset`` makes dates and numbers of those that look so; or
    of ``NAME[:PART[:SPLIT]]`` on the hub, where a split may have a slice, such as ``train[:100]``. SystemExit: a line is no
    JSON object."""
    path = Path(source)
    if path.suffix == ".csv":
        # utf-8-sig: a spreadsheet may put a byte-order mark in front, which would be in the first name.
        return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))
    if path.suffix == ".json":
        with suppress(ValueError):  # else it has lines
            return json.loads(path.read_bytes())
    if path.suffix in (".json", ".jsonl", ".parquet"):
        try:
            return [row for _, row in json_lines(path)]
        except ValueError as error:
            raise SystemExit(f"trl_grail: {error}") from None
    from datasets import load_dataset

    name, part, split = (*source.split(":", 2), "", "")[:3]
    return load_dataset(name, part or None, split=split or "train")


def problem(row: dict[str, Any]) -> dict[str, Any]:
    """A row as TRL takes it."""
    question = next(row[name] for name in ("prompt", "question", "problem") if name in row)
    if isinstance(question, str):
        question = [{"role": "user", "content": f"{question}\n{ASK}"}]
    return {"prompt": question, "solution": gold_text(answer(row))}


def answer(row: dict[str, Any]) -> Any:
    """A row's answer as the data set has it, but for what is before ``####``."""
    if row.get("reward_model") is not None:
        return row["reward_model"].get("ground_truth")
    value = next((row[name] for name in ("answer", "solution") if row.get(name) is not None), None)
    if not isinstance(value, str):
        return value
    return value.rsplit("####", 1)[-1].strip()


def reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    log_metric: Callable[..., None],
    **_: Any,
) -> list[float]:
    """1 where the last box of a response states the solution; ``verify_failed`` is the share without a verdict."""
    answered = zip(completions, solution, strict=True)
    verdicts = [compute_score("", completion[-1]["content"], gold) for completion, gold in answered]
    log_metric(
        "verify_failed", sum(verdict["verify_failed"] for verdict in verdicts) / len(verdicts)
    )
    return [verdict["score"] for verdict in verdicts]


def parse_options() -> argparse.Namespace:
    """The command line; ``--tiny --help`` shows the defaults of ``--tiny``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    tiny = "--tiny" in sys.argv
    default = "(default: %(default)s)"
    add(
        "--tiny",
        action="store_true",
        help="no GPU and no hub: sums, by the model that comes with verl-cpu",
    )
    add(
        "--model", default=None if tiny else "Qwen/Qwen3-1.7B", help=f"hub name or folder {default}"
    )
    add(
        "--data",
        default=None if tiny else "openai/gsm8k:main",
        help=f"file, or hub name[:part[:split]] {default}",
    )
    add(
        "--held-out",
        help="problems for evaluation, likewise, such as openai/gsm8k:main:test (default: none)",
    )
    add(
        "--method",
        default="grail",
        help="NAME[:option=value,...], of docs/methods.md; none: TRL's own trainer",
    )
    add("--control", default="none", choices=get_args(Control), help=f"docs/credit.md {default}")
    add("--output", type=Path, help="default: outputs/trl_METHOD")
    add("--vllm", action="store_true", help="generate with vLLM on the same GPU")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="with gradient checkpointing (default: on a GPU)",
    )
    add("--report-to", default="none", help=f"wandb, trackio, tensorboard, ... {default}")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    for name, value in (NUMBERS | (TINY if tiny else {})).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help=default)
    options = parser.parse_args()
    if tiny and (options.model or options.data or options.held_out):
        parser.error(
            "--tiny brings a model and its problems; leave out --model, --data and --held-out"
        )
    if options.method != STOCK:
        try:
            method_of(options)
        except ValueError as error:
            parser.error(str(error))
    responses = options.prompts * options.rollouts
    options.micro_batch = max(1, min(options.micro_batch, responses))
    if responses % options.micro_batch:
        parser.error(
            f"--prompts x --rollouts, {responses}, is no multiple of --micro-batch {options.micro_batch}"
        )
    options.output = options.output or Path(
        "outputs", f"trl_{'tiny_' if tiny else ''}{options.method.partition(':')[0]}"
    )
    return options


if __name__ == "__main__":
    main()
