#!/usr/bin/env bash
# GRAIL | Qwen3-4B | FSDP2 | NVIDIA GPUs
# Arguments are Hydra overrides; `--cfg job` prints the configuration and starts nothing.

set -xeuo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---------------------------------------- user-adjustable ----------------------------------------

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/math/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/math/test.parquet}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
ADV_ESTIMATOR=${ADV_ESTIMATOR:-grail} # uniform: the baseline in the same trainer

# --------------------------------------------------------------------------------------------------

# Imports the plug-in where grail_advantage is a checkout on the Python path, and no installed package.
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-grail_advantage.verl_ext.plugin}

DATA=(
    "data.train_files=$TRAIN_FILES"
    "data.val_files=$VAL_FILES"
    # no thinking: the chat template puts an empty <think></think> in front of the response
    +data.apply_chat_template_kwargs.enable_thinking=False
)
MODEL=("actor_rollout_ref.model.path=$MODEL_PATH")
ALGORITHM=("algorithm.adv_estimator=$ADV_ESTIMATOR")
TRAINER=("trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$NGPUS_PER_NODE")

"${PYTHON:-python3}" -m verl.trainer.main_ppo --config-path="$here/config" --config-name=grail_trainer \
    "${DATA[@]}" "${MODEL[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
