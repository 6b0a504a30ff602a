"""GRAIL in TRL | a model of 0.65 M parameters on the CPU, or any other on a GPU | transformers generation, or vLLM

    python examples/trl_grail.py                        a small warmed-up model, worked arithmetic, no GPU
    python examples/trl_grail.py --method surprisal     another registered method; --option NAME=VALUE sets its options
    python examples/trl_grail.py --model Qwen/Qwen3-4B --train-file train.parquet --validation-file validation.parquet ...

The files hold the columns ``prompt`` (messages) and ``reward_model`` (``{"ground_truth": ...}``), as
``scripts/prepare_data.sh`` writes them. ``accelerate launch examples/trl_grail.py ...`` trains on several GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipe is no part of the installed package
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if importlib.util.find_spec("trl") is None:  # then in the folder of requirements-trl.txt, if anywhere
    sys.path.append(f"{sys.prefix}/trl")
    if importlib.util.find_spec("trl") is None:
        sys.exit(
            f"TRL is missing: {sys.executable} -m pip install --no-deps --target {sys.prefix}/trl -r requirements-trl.txt"
        )

import torch
import yaml
from datasets import Dataset
from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback
from trl import GRPOConfig

from grail_advantage.methods import methods
from grail_advantage.tokenizers import load_tokenizer
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from recipe import run_report
from recipe.reward import compute_score
from recipe.tiny.prepare import MODEL_FOLDER, default_settings, prepare


def main() -> None:
    options = parse_options()
    run_dir = options.output_dir / f"seed{options.seed}" / f"{options.method}_trl"
    model, train_file, validation_file = options.model, options.train_file, options.validation_file
    if model is None:
        data_dir = options.output_dir / f"seed{options.seed}"
        prepare(data_dir, default_settings("tiny", options.seed))
        model = data_dir / MODEL_FOLDER
        train_file, validation_file = data_dir / "train.parquet", data_dir / "validation.parquet"
    trainer = build_trainer(options, str(model), train_file, validation_file, run_dir)
    trainer.train()
    if trainer.is_world_process_zero():
        title = f"{options.method} in TRL, {options.model or 'tiny, worked arithmetic'}, seed {options.seed}"
        print(run_report.summary(run_dir, title))


def build_trainer(
    options: argparse.Namespace, model: str, train_file: Path, validation_file: Path, run_dir: Path
) -> TokenWeightGRPOTrainer:
    """The trainer, with the metrics of an earlier run in the same place removed."""
    on_gpu = torch.cuda.is_available()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = options.prompts * options.rollouts // processes
    config = GRPOConfig(
        output_dir=str(run_dir),
        # batch and lengths: one update a batch of prompts x rollouts responses
        num_generations=options.rollouts,
        per_device_train_batch_size=min(rows, options.micro_batch_size),
        gradient_accumulation_steps=max(1, rows // options.micro_batch_size),
        per_device_eval_batch_size=options.micro_batch_size,
        num_generations_eval=1,
        max_completion_length=options.max_response_length,
        temperature=1.0,
        top_k=0,
        # learning: the loss and the settings of the published runs
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=options.seed,
        # infrastructure
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=on_gpu,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        # schedule and logs
        max_steps=options.steps,
        eval_strategy="steps",
        eval_steps=options.eval_every,
        eval_on_start=True,
        save_strategy="no",
        logging_steps=1,
        report_to="tensorboard",
    )
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run_dir / "tensorboard")
    tokenizer = load_tokenizer(model, padding_side="left")
    trainer = TokenWeightGRPOTrainer(
        model,
        reward,
        config,
        train_dataset=Dataset.from_parquet(str(train_file)),
        eval_dataset=Dataset.from_parquet(str(validation_file)),
        processing_class=tokenizer,
        token_weights=options.method,
        token_weight_options=dict(options.option),
    )
    trainer.remove_callback(ProgressCallback)
    if trainer.is_world_process_zero():
        shutil.rmtree(run_dir, ignore_errors=True)
        trainer.add_callback(Report(run_dir, options.method))
    return trainer


def reward(completions: list[list[dict[str, str]]], reward_model: list[dict[str, Any]], **_: Any) -> list[float]:
    """1 where the last box of a response states the gold answer."""
    return [
        compute_score("", completion[-1]["content"], row["ground_truth"])["score"]
        for completion, row in zip(completions, reward_model, strict=True)
    ]


class Report(TrainerCallback):
    """A progress bar, and the file that ``recipe.run_report`` reads."""

    def __init__(self, run_dir: Path, method: str) -> None:
        self.names = {
            "eval_reward": "val-core/held_out/acc/mean@1",
            "reward": "critic/score/mean",
            "step_time": "timing_s/step",
            f"{method}/selected_rate": f"{method}/selected_rate",
        }
        run_dir.mkdir(parents=True)
        self.metrics_file = run_dir / run_report.METRICS_FILE
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(total=state.max_steps, unit="step", dynamic_ncols=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        data = {self.names[name]: value for name, value in logs.items() if name in self.names}
        with self.metrics_file.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "data": data}) + "\n")
        self.bar.update(state.global_step - self.bar.n)
        for name, label in (("reward", "reward"), ("eval_reward", "held-out accuracy")):
            if name in logs:
                self.shown[label] = f"{logs[name]:.3f}"
        self.bar.set_postfix(self.shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="grail", choices=sorted(methods()), metavar="NAME", help="default: grail")
    parser.add_argument(
        "--option", action="append", default=[], type=method_option, metavar="NAME=VALUE", help="of the method"
    )
    parser.add_argument("--model", help="name or folder; needs the two files")
    parser.add_argument("--train-file", type=Path)
    parser.add_argument("--validation-file", type=Path)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--rollouts", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--micro-batch-size", type=int, default=128)
    parser.add_argument("--max-response-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/tiny_cpu"))
    options = parser.parse_args()
    if options.model and not (options.train_file and options.validation_file):
        parser.error("--model needs --train-file and --validation-file")
    return options


def method_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    main()
