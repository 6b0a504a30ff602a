#!/usr/bin/env bash
# GRAIL | Qwen2.5-1.5B-Instruct on GSM8K | FSDP2 | NVIDIA GPUs
# First: bash scripts/prepare_data.sh --train gsm8k_train --benchmarks gsm8k
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-${DATA_DIR:-$PWD/data}/gsm8k_train.parquet}
TEST_FILE=${TEST_FILE:-${DATA_DIR:-$PWD/data}/gsm8k.parquet}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
SEQUENCES=10
TOTAL_EPOCHS=${TOTAL_EPOCHS:-3} # 174 steps
SAVE_FREQ=${SAVE_FREQ:-50}
PROJECT_NAME=${PROJECT_NAME:-gsm8k}
EXTRA=(actor_rollout_ref.actor.ppo_epochs=1 actor_rollout_ref.rollout.val_kwargs.n=1)
source examples/run.sh
