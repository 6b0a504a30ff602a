#!/usr/bin/env bash
# GRAIL | Qwen3-4B | FSDP2 | NVIDIA GPUs
# Arguments are Hydra overrides; `--cfg job` prints the configuration and starts nothing.

set -xeuo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---------------------------------------- user-adjustable ----------------------------------------

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
TRAIN_FILES=${TRAIN_FILES:-$PWD/data/deepmath.parquet}  # from scripts/prepare_data.sh
VAL_FILES=${VAL_FILES:-$PWD/data/math500.parquet}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-20480} # four responses of full length; for GPUs with 80 GB
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
ADV_ESTIMATOR=${ADV_ESTIMATOR:-grail} # uniform: the baseline in the same trainer

# --------------------------------------------------------------------------------------------------

# Imports the plug-in where grail_advantage is a checkout on the Python path, and no installed package.
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-grail_advantage.verl_ext.plugin}

quoted() { # TEXT -> the same in Hydra's grammar, whatever its characters; a list [A,B] stays one
    [[ $1 == \[*\] ]] && printf %s "$1" && return
    printf %s "$1" | sed -z "s/\(\\\\*\)'/\1\1\\\\'/g; s/\(\\\\*\)\$/\1\1/; s/.*/'&'/"
}

DATA=(
    "data.train_files=$(quoted "$TRAIN_FILES")"
    "data.val_files=$(quoted "$VAL_FILES")"
    # no thinking: the chat template puts an empty <think></think> in front of the response
    +data.apply_chat_template_kwargs.enable_thinking=False
)
MODEL=("actor_rollout_ref.model.path=$(quoted "$MODEL_PATH")")
ACTOR=("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$PPO_MAX_TOKEN_LEN_PER_GPU")
ALGORITHM=("algorithm.adv_estimator=$ADV_ESTIMATOR")
TRAINER=(
    "trainer.nnodes=$NNODES"
    "trainer.n_gpus_per_node=$NGPUS_PER_NODE"
    # curves beside the checkpoints: PROJECT/EXPERIMENT.jsonl; the process that writes them has not this environment
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_ROOT=$PWD/checkpoints"
)

"${PYTHON:-python3}" -m verl.trainer.main_ppo --config-path="$here/config" --config-name=grail_trainer \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
