"""Part e: whole verl runs with vLLM. The tiny model that the repository ships, trained with GRAIL and with ``uniform``, and the
evaluation of the first one's checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_check.outcome import Outcome
from gpu_check.parts import last_line, run_command
from gpu_check.runs import DRY_STEPS, EVERY, METHODS, RUNS, STEPS, environment, judge, logged_figures, train

PROMPT, RESPONSE = 32, 64
BENCHMARK = "aime24"
"""The name that the held-out problems go by in the evaluation; they are none of AIME's."""
SHOWN = (
    *("timing_s/step", "timing_s/gen", "timing_s/old_log_prob", "timing_s/token_weights", "timing_s/update_actor"),
    *("timing_s/update_weights", "actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb"),
    *("response_length/mean", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
    *("actor/grad_norm", "grail/selected_rate", "grail/average_weight"),
)
"""Metrics of the last step that the page shows, where verl logs them."""


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` with vLLM's CPU build and fewer steps.
    """
    from recipe.tiny.prepare import default_settings, prepare

    folder = RUNS / "verl"
    steps = STEPS if device == "cuda" else DRY_STEPS
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder, default_settings("tiny", 0))
    for method in METHODS:
        with outcome.attempt(f"{method} in verl"):
            run_dir = folder / method
            variables = {"VERL_FILE_LOGGER_PATH": str(run_dir / "metrics.jsonl")}
            if device == "cpu":
                variables |= {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
            logged = train(
                outcome, method, command(method, device, folder, run_dir, steps), run_dir, steps, **variables
            )
            judge(outcome, method, method, logged)
            logged_figures(outcome, method, logged[max(logged)], SHOWN)
        if method == METHODS[0]:
            with outcome.attempt("evaluation of the checkpoint"):
                evaluate(outcome, folder, folder / method / "checkpoints" / f"global_step_{steps}")


def command(method: str, device: str, folder: Path, run_dir: Path, steps: int) -> list[str]:
    """Start of a run: the recipe's configuration, or the CPU's, with lengths and batch of the tiny example."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    overrides = [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'validation.parquet'}",
        "data.train_batch_size=32",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{actor}.optim.lr=2e-4",
        f"{actor}.ppo_mini_batch_size=32",
        f"{rollout}.n=8",
        f"{rollout}.top_k=-1",
        *(f"{rollout}.val_kwargs.{value}" for value in ("n=1", "do_sample=True", "temperature=1.0", "top_k=-1")),
        f"algorithm.adv_estimator={method}",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "reward.custom_reward_function.path=pkg://grail_advantage.reward",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=True",
        f"trainer.test_freq={EVERY}",
        f"trainer.save_freq={steps}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={run_dir / 'checkpoints'}",
        f"hydra.run.dir={run_dir / 'hydra'}",
    ]
    if device == "cpu":
        overrides += [f"{actor}.ppo_micro_batch_size_per_gpu=128", f"{rollout}.log_prob_micro_batch_size_per_gpu=128"]
        overrides += [f"{actor}.loss_agg_mode=seq-mean-token-sum-norm", f"{actor}.loss_scale_factor={RESPONSE}"]
    else:
        overrides += [f"{actor}.ppo_max_token_len_per_gpu=16384", f"{actor}.ppo_epochs=1"]
        # One epoch a batch at the tiny example's learning rate, from the first step on.
        overrides += [f"{actor}.optim.lr_scheduler_type=constant", f"{actor}.optim.lr_warmup_steps=0"]
        overrides += [f"{rollout}.max_model_len={PROMPT + RESPONSE}", f"{rollout}.gpu_memory_utilization=0.3"]
        overrides += [f"{rollout}.enforce_eager=True", *attention()]
    config = "cpu_trainer" if device == "cpu" else "grail_trainer"
    return [sys.executable, "-m", "recipe.main_grail", "--config-name", config, *overrides]


def attention() -> list[str]:
    """The override without which verl asks for flash-attn, where that is not installed."""
    there = find_spec("flash_attn") is not None
    return [] if there else ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]


def evaluate(outcome: Outcome, folder: Path, checkpoint: Path) -> None:
    """Merge a checkpoint and evaluate it on the held-out problems."""
    import pyarrow.parquet as pq

    problems = pq.read_table(folder / "validation.parquet")
    at = problems.schema.get_field_index("data_source")
    pq.write_table(
        problems.set_column(at, "data_source", [[BENCHMARK] * len(problems)]), folder / f"{BENCHMARK}.parquet"
    )
    output_dir = folder / "evaluation"
    call = ["bash", "scripts/evaluate.sh", "--model", str(checkpoint), "--benchmarks", BENCHMARK, "--samples", "1"]
    call += ["--data-dir", str(folder), "--max-tokens", str(RESPONSE), "--temperature", "1.0", "--top-k", "0"]
    code, output = run_command([*call, "--output-dir", str(output_dir)], environment=environment())
    shutil.rmtree(checkpoint.parent, ignore_errors=True)
    if code != 0:
        outcome.check("evaluation of the checkpoint", False, f"exit status {code}: {last_line(output)}")
        return
    result = json.loads((output_dir / "results.json").read_text(encoding="utf-8"))["benchmarks"][BENCHMARK]
    answered = 1 - result["unanswered"]["value"]
    outcome.check(
        "evaluation of the checkpoint",
        answered > 0.5,
        f"{result['problems']} held-out problems, {answered:.0%} of the responses answered",
    )
    values = {key: of["value"] for key, of in result.items() if isinstance(of, dict) and "value" in of}
    outcome.figures("step, evaluation", values)
