# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # variables go to and come from the sourcing script
#
# Shared by examples/run_*_grail.sh for NVIDIA GPUs: reads the knobs, checks them and fills the parameter arrays. The sourcing
# script has set model_path, max_response_length and micro_batch_sequences, and then adds its model's parameters
# to the arrays. The published hyper-parameters themselves are in recipe/config/grail_trainer.yaml.

# ---------------------------------------- user-adjustable ----------------------------------------

# infrastructure
python=${PYTHON:-python3}
nnodes=${NNODES:-1}
ngpus_per_node=${NGPUS_PER_NODE:-8}
offload=${OFFLOAD:-False}                         # True: parameters and optimiser state wait in host memory
data_dir=${DATA_DIR:-$PWD/data}                   # from scripts/prepare_data.sh
dry_run=${DRY_RUN:-0}                             # 1: check everything, print the resolved configuration, start nothing
fresh=${FRESH:-0}                                 # 1: a new run; the folder of an earlier one of its name is moved away

# batch and lengths
train_batch_size=${TRAIN_BATCH_SIZE:-32}          # prompts in a rollout batch
max_prompt_length=${MAX_PROMPT_LENGTH:-1024}

# learning
# any registered method (docs/methods.md); grpo: uniform, which is GRPO in the same trainer; verl_grpo: verl's stock trainer,
# which does not mask truncated responses
adv_estimator=${ADV_ESTIMATOR:-grail}
preset=${PRESET:-official}                        # of grail: official | robust
oar_variant=${OAR_VARIANT:-}                      # official | grail_port; unset: of oar_g grail_port, as published, else official
lora_rank=${LORA_RANK:-0}                         # 0: train all parameters
seed=${SEED:-42}                                  # of prompts, sampling and training

# rollout
rollout_n=${ROLLOUT_N:-8}                         # responses to a prompt
rollout_tp=${ROLLOUT_TP:-1}                       # GPUs that share one vLLM engine

# schedule, in rollout batches; each makes 4 optimiser steps
total_steps=${TOTAL_STEPS:-50}
save_freq=${SAVE_FREQ:-10}                        # -1: never
test_freq=${TEST_FREQ:-10}                        # -1: never

# names
project_name=${PROJECT_NAME:-grail}
logger=${LOGGER:-console,file,tensorboard}

# ------------------------------------- derived values and checks ---------------------------------

# shellcheck source=scripts/launch.sh
source scripts/launch.sh
check_counts NNODES NGPUS_PER_NODE TRAIN_BATCH_SIZE ROLLOUT_N MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH ROLLOUT_TP TOTAL_STEPS
check_knobs '-1|[1-9][0-9]*' "a whole number from 1 on, or -1 for off" SAVE_FREQ TEST_FREQ
check_knobs '0|[1-9][0-9]*' "a whole number from 0 on" SEED LORA_RANK
check_knobs 'True|False' "True or False" OFFLOAD
check_knobs '0|1' "0 or 1" DRY_RUN FRESH
refuse_references "DATA_DIR=$data_dir" "MODEL_PATH=$model_path" "PROJECT_NAME=$project_name" "EXPERIMENT_NAME=${EXPERIMENT_NAME:-}"
choose_method

sequence_length=$((max_prompt_length + max_response_length))
ppo_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU:-$((micro_batch_sequences * sequence_length))}
check_counts PPO_MAX_TOKEN_LEN_PER_GPU
learning_rate=${LEARNING_RATE:-1e-6}
# Adapters start at zero and need about ten times the learning rate.
((lora_rank == 0)) || learning_rate=${LEARNING_RATE:-1e-5}
check_knobs '[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?' "a number such as 1e-6" LEARNING_RATE
command -v "$python" >/dev/null ||
    refuse "PYTHON=$python is not a command; name the interpreter that has requirements.txt installed"
if [[ -z ${PYTHON:-} ]] && ! python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)'; then
    [[ $dry_run == 1 ]] ||
        refuse "python3 has no verl; run bash scripts/setup_gpu.sh, or set PYTHON to an interpreter that has it"
    # A dry run needs no GPU, so the environment for the CPU will do.
    bash scripts/setup_cpu.sh >&2
    python=.venv/bin/python
fi
((train_batch_size * rollout_n % (nnodes * ngpus_per_node) == 0)) ||
    refuse "TRAIN_BATCH_SIZE=$train_batch_size x ROLLOUT_N=$rollout_n responses do not divide among NNODES=$nnodes x" \
        "NGPUS_PER_NODE=$ngpus_per_node GPUs; change one of them"
((ngpus_per_node % rollout_tp == 0)) || refuse "ROLLOUT_TP=$rollout_tp must divide NGPUS_PER_NODE=$ngpus_per_node"
if [[ $dry_run == 0 && " $* " != *" data."*"_files="* ]]; then
    for dataset in deepmath amc23 aime24; do
        [[ -f $data_dir/$dataset.parquet ]] ||
            refuse "DATA_DIR=$data_dir has no $dataset.parquet; run PYTHON=$python bash scripts/prepare_data.sh first"
    done
fi

# A run resumes from the last checkpoint under its name, so the name holds the settings that one compares; other differences are
# refused at start-up (recipe/run_life/identity.py).
variant=$method
if [[ $method == grail ]]; then
    variant+=-$preset
elif [[ $method == oar_* ]]; then
    variant+=-$oar_variant
fi
for argument in "$@"; do
    if [[ $argument =~ ^[+]*algorithm\.([a-z_]+)\.([a-z_]+)=([A-Za-z0-9_.-]+)$ && ${BASH_REMATCH[1]} != token_* ]]; then
        variant+=-${BASH_REMATCH[2]}-${BASH_REMATCH[3]}
    fi
done
if [[ -n ${MAX_RESPONSE_LENGTH:-} ]]; then
    variant+=-len$max_response_length
fi
if ((lora_rank > 0)); then
    variant+=-lora$lora_rank
fi
model_name=$(basename "$model_path")
model_name=$(tr '[:upper:]' '[:lower:]' <<<"${model_name//[^A-Za-z0-9._-]/_}")
experiment_name=${EXPERIMENT_NAME:-$model_name-$variant-seed$seed}
output_dir=$PWD/outputs/$project_name/$experiment_name

# ------------------------------------------------ parameters --------------------------------------

DATA=(
    data.train_files="$(quoted "$data_dir/deepmath.parquet")"
    data.val_files="[$(quoted "$data_dir/amc23.parquet"),$(quoted "$data_dir/aime24.parquet")]"
    data.train_batch_size="$train_batch_size"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
    data.seed="$seed"
)
MODEL=(
    actor_rollout_ref.model.path="$(quoted "$model_path")"
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr="$learning_rate"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$ppo_max_token_len_per_gpu"
    actor_rollout_ref.actor.fsdp_config.param_offload="$offload"
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$offload"
)
ROLLOUT=(
    actor_rollout_ref.rollout.n="$rollout_n"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$rollout_tp"
    # verl compares it with the model's context length and stops where it is too long
    actor_rollout_ref.rollout.max_model_len="$sequence_length"
)
# Only there when an override such as actor_rollout_ref.actor.use_kl_loss=True asks for a reference model.
REF=(
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
ALGORITHM=(
    algorithm.adv_estimator="$adv_estimator"
    algorithm.grail.preset="$preset"
    algorithm.oar.variant="$oar_variant"
    # scores and weight of every token, for python -m grail_advantage.report; see docs/token_dump.md
    algorithm.token_dump.folder="$(quoted "$output_dir/tokens")"
    algorithm.token_dump.every=10
)
TRAINER=(
    trainer.nnodes="$nnodes"
    trainer.n_gpus_per_node="$ngpus_per_node"
    trainer.total_training_steps="$total_steps"
    trainer.save_freq="$save_freq"
    trainer.test_freq="$test_freq"
    trainer.logger="[$logger]"
    trainer.project_name="$(quoted "$project_name")"
    trainer.experiment_name="$(quoted "$experiment_name")"
    trainer.default_local_dir="$(quoted "$output_dir/checkpoints")"
)
# The process that writes the logs runs somewhere in the Ray cluster, without this shell's environment.
EXTRA=(
    +ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$(quoted "$output_dir/tensorboard")"
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$(quoted "$output_dir/metrics.jsonl")"
    hydra.run.dir="$(quoted "$output_dir/hydra")"
)
if ((lora_rank > 0)); then
    MODEL+=(
        actor_rollout_ref.model.lora_rank="$lora_rank"
        actor_rollout_ref.model.lora_alpha="$((2 * lora_rank))"
        actor_rollout_ref.model.target_modules=all-linear
    )
    # Only adapters travel to vLLM, so it has to load the base weights itself.
    ROLLOUT+=(actor_rollout_ref.rollout.load_format=safetensors)
fi
if [[ $dry_run == 1 ]]; then
    # A dry run writes no file.
    EXTRA+=(hydra.run.dir=. hydra.output_subdir=null hydra/job_logging=disabled hydra/hydra_logging=disabled)
fi
[[ $fresh == 0 || $dry_run == 1 ]] || start_fresh "$output_dir"

# Trains with the arrays and further overrides. After it the summary of the whole run, all starts of it, where the file logger
# keeps it.
run_training() {
    DRY_RUN=$dry_run launch "$python" -m recipe.main_grail \
        "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REF[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" \
        "${EXTRA[@]}" "$@"
    if [[ $dry_run == 0 && -f $output_dir/metrics.jsonl ]]; then
        "$python" -m recipe.run_report summary "$output_dir" --title "$experiment_name" ||
            echo "the run is done; its summary could not be made" >&2
    fi
}
