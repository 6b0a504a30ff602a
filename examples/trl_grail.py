"""GRAIL in TRL | Qwen3-1.7B with LoRA | one GPU with 24 GB | GSM8K

    pip install -e '.[trl]'                                          in the repository; all that this file imports
    python examples/trl_grail.py                                     model and data from the hub
    python examples/trl_grail.py --data my.jsonl --model my_model    a .json, .jsonl, .parquet or .csv file, or a hub name
    python examples/trl_grail.py --tiny                              a model of 0.65 M parameters on sums: no GPU, no hub

A row has a question, as ``question``, ``problem`` or ``prompt`` (a text, or messages that ask for a box already), and its
answer, as ``answer`` (of which the part after ``####`` counts), ``solution``, or verl's ``reward_model``.

On a GPU three steps of a small model ran so far (docs/gpu.md). Most of a step is generation by transformers, at about 0.1 s a
token of 64 responses: 1024 tokens should take two minutes, and 200 steps six hours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grail_advantage.method import methods
from grail_advantage.reward import check_ground_truths, compute_score, gold_text

if TYPE_CHECKING:
    from datasets import Dataset

TINY = {"prompts": 16, "micro_batch": 128, "max_response": 64, "lora_rank": 0, "learning_rate": 3e-4, "steps": 16}
TINY |= {"eval_every": 4, "dump_every": 4, "save_steps": 8}
"""Defaults with ``--tiny``."""
ASK = "Reason step by step, and put your final answer within \\boxed{}."
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def main() -> None:
    options = parse_options()
    try:
        from transformers.trainer_utils import get_last_checkpoint
        from trl import GRPOConfig

        from grail_advantage.trl_ext import TokenWeightGRPOTrainer
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"trl_grail: {error}; run `pip install -e '.[trl]'` in the repository, in an environment without verl, or set "
            "PYTHONPATH=.venv/trl in that of scripts/setup_cpu.sh"
        ) from error
    checkpoint = get_last_checkpoint(options.output) if options.resume and options.output.is_dir() else None
    if options.resume and checkpoint is None:
        raise SystemExit(f"trl_grail: --resume: {options.output} has no checkpoint to go on from; leave out --resume")
    if not options.resume and (options.output / "metrics.jsonl").exists():
        raise SystemExit(
            f"trl_grail: {options.output} has a run, which a new one would replace; go on with it by --resume, or name another "
            "folder with --output"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        make_tiny(options)
    # FlashInfer's sampler is compiled at run time, for which many machines have no nvcc.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    config = GRPOConfig(
        output_dir=str(options.output),
        # Batch and lengths: one update a batch of prompts x rollouts responses, micro_batch of them at a time.
        num_generations=options.rollouts,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.prompts * options.rollouts,
        gradient_accumulation_steps=max(1, options.prompts * options.rollouts // options.micro_batch),
        max_completion_length=options.max_response,
        # Learning: the loss of the published runs, with a rate for LoRA.
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        epsilon_high=0.28,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        seed=options.seed,
        # Memory and speed
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=options.bf16,
        model_init_kwargs={"dtype": "bfloat16" if options.bf16 and options.lora_rank else "float32"},
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        # Prompts and logs
        chat_template_kwargs={"enable_thinking": False},
        logging_steps=1,
        report_to=options.report_to,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 1,
        save_total_limit=2,
        eval_strategy="steps" if options.held_out else "no",
        eval_steps=options.eval_every,
        eval_on_start=bool(options.held_out),
        num_generations_eval=1,
    )
    trainer = TokenWeightGRPOTrainer(
        options.model,
        reward,
        config,
        train_dataset=problems(options.data),
        eval_dataset=problems(options.held_out) if options.held_out else None,
        peft_config=lora(options.lora_rank) if options.lora_rank else None,
        token_weights=options.method,
        token_dump={"folder": options.output / "tokens", "every": options.dump_every},
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        judged = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
        if judged:
            print(f"Share of held-out problems answered correctly: {judged[0]:.2f} before, {judged[-1]:.2f} after")
        print(f"Every token's weight, in one page: python -m grail_advantage.report {options.output}")


def make_tiny(options: argparse.Namespace) -> None:
    """Write the tiny model and its problems, and name them in the options."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/verl-cpu"))  # it need not be installed
    from verl_cpu.tiny.shipped import load_shipped
    from verl_cpu.tiny.task import random_problems

    made = [
        json.dumps({"prompt": [{"role": "user", "content": problem.text}], "answer": str(problem.answer)})
        for problem in random_problems(768)
    ]
    for part in load_shipped():
        part.save_pretrained(options.output / "tiny")
    for name, lines in (("held_out", made[:128]), ("train", made[128:])):
        file = options.output / f"{name}.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8")
        setattr(options, {"train": "data"}.get(name, name), str(file))
    options.model = str(options.output / "tiny")


def problems(source: str) -> Dataset:
    """Prompts, as messages, and solutions, from a file or from the hub, without rows whose answer cannot be used."""
    from datasets import load_dataset

    file = Path(source)
    if file.suffix in FORMATS:
        rows = load_dataset(FORMATS[file.suffix], data_files=str(file), split="train")
    else:
        name, part, split = (*source.split(":"), "", "")[:3]
        rows = load_dataset(name, part or None, split=split or "train")
    unusable = set(check_ground_truths(map(answer, rows), source))
    rows = rows.select([row for row in range(len(rows)) if row not in unusable])
    return rows.map(problem, remove_columns=rows.column_names)


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
    return value.rsplit("####", 1)[-1].strip() if isinstance(value, str) else value


def reward(
    completions: list[list[dict[str, str]]], solution: list[str], log_metric: Callable[..., None], **_: Any
) -> list[float]:
    """1 where the last box of a response states the solution; ``verify_failed`` is the share without a verdict."""
    verdicts = [
        compute_score("", completion[-1]["content"], gold)
        for completion, gold in zip(completions, solution, strict=True)
    ]
    log_metric("verify_failed", sum(verdict["verify_failed"] for verdict in verdicts) / len(verdicts))
    return [verdict["score"] for verdict in verdicts]


def lora(rank: int) -> Any:
    """An adapter on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def parse_options() -> argparse.Namespace:
    """The command line; its defaults are for 24 GB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = {"help": "default: %(default)s"}
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="no GPU and no hub: sums, by the model that comes with verl-cpu; other defaults, which --tiny --help shows",
    )
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B", help="hub name or folder (default: %(default)s)")
    parser.add_argument(
        "--data", default="openai/gsm8k:main", help="file, or hub name[:part[:split]] (default: %(default)s)"
    )
    parser.add_argument(
        "--held-out", help="problems for evaluation, likewise, such as openai/gsm8k:main:test (default: none)"
    )
    known = sorted(methods())
    parser.add_argument(
        "--method",
        default="grail",
        choices=known,
        metavar="NAME",
        help=f"{', '.join(known)}; uniform: every weight is 1",
    )
    parser.add_argument("--output", type=Path, help="default: outputs/trl_METHOD")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM on the same GPU")
    bf16 = {"action": argparse.BooleanOptionalAction, "default": torch.cuda.is_available()}
    parser.add_argument("--bf16", **bf16, help="with gradient checkpointing (default: on a GPU)")
    parser.add_argument("--report-to", default="none", help="wandb, trackio, tensorboard, ... (default: %(default)s)")
    parser.add_argument(
        "--save-steps", type=int, default=50, help="steps between checkpoints; 0: none (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    numbers = {"prompts": 8, "rollouts": 8, "micro_batch": 4, "max_response": 1024, "lora_rank": 32, "steps": 200}
    numbers |= {"eval_every": 20, "dump_every": 10, "seed": 0}
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, **default)
    parser.add_argument("--learning-rate", type=float, default=1e-5, **default)
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY, model=None, data=None)
    options = parser.parse_args()
    if options.tiny and (options.model or options.data or options.held_out):
        parser.error("--tiny brings a model and its problems; leave out --model, --data and --held-out")
    if options.save_steps < 0:
        parser.error(f"--save-steps {options.save_steps} must be 0 (no checkpoints) or more")
    responses = options.prompts * options.rollouts
    options.micro_batch = max(1, min(options.micro_batch, responses))
    if options.rollouts < 2 or responses % options.micro_batch:
        parser.error(
            f"--rollouts {options.rollouts} must be 2 or more, and --prompts times --rollouts ({responses}) a multiple of "
            f"--micro-batch {options.micro_batch}"
        )
    options.output = options.output or Path("outputs", f"trl_{'tiny_' if options.tiny else ''}{options.method}")
    return options


if __name__ == "__main__":
    main()
