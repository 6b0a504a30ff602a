"""Part f: whole steps at the shape of Qwen3-4B, as the launch script that ``scripts/sizing.py`` names for this GPU makes them.

The weights are random, so that nothing is downloaded. Such a model cannot answer: rewards and the places of answers are given
(:mod:`~gpu_check.given`). What a step takes, and the memory while vLLM sleeps, are as with any weights.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gpu_check.given import NOTES
from gpu_check.outcome import Outcome
from gpu_check.parts import ROOT
from gpu_check.plain import FULL, TOY, random_model, release, wordy_tokenizer
from gpu_check.runs import RUNS, judge, logged_figures, train
from gpu_check.verl_runs import SHOWN, attention

STEPS, PROMPTS, ROLLOUTS, RESPONSE = 2, 8, 8, 2048
NAME = "random weights, given rewards and answers"
PROJECT, RUN = "gpu_check", "whole_step"


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with vLLM's CPU build and a toy shape.
    """
    folder = RUNS / "large"
    run_dir = folder if device == "cpu" else ROOT / "outputs" / PROJECT / RUN
    for earlier in (folder, run_dir):
        shutil.rmtree(earlier, ignore_errors=True)
    with outcome.attempt("a whole step"):
        write_inputs(folder, FULL.shapes["Qwen3-4B"] if device == "cuda" else TOY.shapes["toy"], device)
        knobs, command = on_cpu(folder) if device == "cpu" else launch_script(folder)
        notes = folder / "notes.jsonl"
        outcome.figures("step, set-up", {"command": shlex.join(command[:2]), **knobs, "tokens of a response": RESPONSE})
        command += [
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'train.parquet'}",
            "algorithm.token_weights.trainer_module=gpu_check.given",
            "trainer.v1.trainer_mode=given",
            f"reward.custom_reward_function.path={ROOT / 'benchmarks/gpu_check/given.py'}",
            "reward.custom_reward_function.name=reward",
            "trainer.val_before_train=False",
            "trainer.resume_mode=disable",
            "algorithm.token_dump.folder=null",
            "algorithm.token_weights.missing_answers=ignore",
        ]
        logged = train(outcome, NAME, command, run_dir, STEPS, **knobs, **{NOTES: str(notes)})
        judge(outcome, NAME, "grail", logged)
        logged_figures(outcome, NAME, logged[max(logged)], SHOWN)
        if notes.exists():
            last = json.loads(notes.read_text(encoding="utf-8").splitlines()[-1])
            outcome.figures("step, GPU memory while vLLM sleeps", dict.fromkeys(last["processes"], ""))
    for left in (folder, run_dir):
        shutil.rmtree(left, ignore_errors=True)


def write_inputs(folder: Path, shape: dict[str, int], device: str) -> None:
    """The model with a tokenizer of as many words, and prompts."""
    model = random_model(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = wordy_tokenizer(shape["vocab_size"])
    for name in ("eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
        setattr(model.generation_config, name, getattr(tokenizer, name))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    del model
    release(device)
    prompt = {"prompt": [{"role": "user", "content": "any"}], "reward_model": {"style": "rule", "ground_truth": "0"}}
    rows = [{"data_source": "given", **prompt, "extra_info": {"index": index}} for index in range(4 * PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def launch_script(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Knobs and words of the command that fits this GPU, with this part's model, batch and schedule."""
    gigabytes = int(torch.cuda.get_device_properties(0).total_memory / 1e9)
    call = [sys.executable, "scripts/sizing.py", "--model", "qwen3-4b", "--gpus", "1", "--memory", str(gigabytes)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.strip().splitlines()[-1])
    at = words.index("bash")
    knobs = dict(word.split("=", 1) for word in words[:at])
    knobs |= {"MODEL_PATH": str(folder / "model"), "TRAIN_BATCH_SIZE": str(PROMPTS), "ROLLOUT_N": str(ROLLOUTS)}
    knobs |= {"MAX_RESPONSE_LENGTH": str(RESPONSE), "TOTAL_STEPS": str(STEPS), "SAVE_FREQ": "-1", "TEST_FREQ": "-1"}
    knobs |= {"LOGGER": "console,file", "PROJECT_NAME": PROJECT, "EXPERIMENT_NAME": RUN}
    return knobs, [*words[at:], *attention()]


def on_cpu(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The same without a GPU, with responses of 64 tokens."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    knobs = {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    return knobs, [
        *(sys.executable, "-m", "recipe.main_grail", "--config-name", "cpu_trainer"),
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *(f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=64", "data.max_response_length=64"),
        *("data.dataloader_num_workers=0", "algorithm.norm_adv_by_std_in_grpo=False"),
        *(f"{actor}.ppo_mini_batch_size={PROMPTS}", f"{actor}.ppo_micro_batch_size_per_gpu=16"),
        *(f"{rollout}.n={ROLLOUTS}", f"{rollout}.log_prob_micro_batch_size_per_gpu=16"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=9", "trainer.save_freq=-1"),
        *("trainer.test_freq=-1", "trainer.logger=[console,file]", f"hydra.run.dir={folder / 'hydra'}"),
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]
