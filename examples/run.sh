# shellcheck shell=bash
#
# The run of run_*.sh, which set what their model needs and source this. Arguments are Hydra overrides, which have the
# last word. DRY_RUN=1 checks everything, prints the resolved configuration and starts nothing. PYTHON is an interpreter
# with verl (scripts/setup_gpu.sh). Several nodes: docs/multi_node.md.

set -euo pipefail
source scripts/knobs.sh
check_knobs OUTPUT_DIR
[[ ${FRESH:-0} == 0 ]] || stop "FRESH=1 is of the scripts without a GPU; set another EXPERIMENT_NAME, or move the run away"
set -x

# ---- user-adjustable, with the names of verl's examples ----
ADV_ESTIMATOR=${ADV_ESTIMATOR:-} # grail; uniform: the baseline in the same trainer; dr_grpo, grpo: verl's estimator
LIKE=${LIKE:-corrected} # published: with what the published run has by accident (docs/published.md)
DATA_DIR=${DATA_DIR:-$PWD/data} # filled by scripts/prepare_data.sh
[[ $LIKE == published ]] && suffix=_published || suffix=
TRAIN_FILE=${TRAIN_FILE:-$DATA_DIR/deepmath$suffix.parquet}
TEST_FILE=${TEST_FILE:-[\"$DATA_DIR/amc23$suffix.parquet\",\"$DATA_DIR/aime24$suffix.parquet\"]}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-$TRAIN_BATCH_SIZE} # an epoch over the batch is one optimiser step
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
whole=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-$((SEQUENCES * whole))}
LORA_RANK=${LORA_RANK:-0}
((LORA_RANK)) && rate=1e-5 || rate=1e-6 # adapters start at zero
ACTOR_LR=${ACTOR_LR:-$rate}
OFFLOAD=${OFFLOAD:-False} # parameters and optimiser state wait in host memory
ROLLOUT_TP=${ROLLOUT_TP:-1}
ROLLOUT_N=${ROLLOUT_N:-8}
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}
SEED=${SEED:-42}
TOTAL_STEPS=${TOTAL_STEPS:-${TOTAL_EPOCHS:+null}} # rollout batches: 50, or as many as TOTAL_EPOCHS takes
SAVE_FREQ=${SAVE_FREQ:-10}
TEST_FREQ=${TEST_FREQ:-10}
LOGGER=${LOGGER:-console,file,tensorboard}
PROJECT_NAME=${PROJECT_NAME:-grail}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-} # MODEL-METHOD-seedN (recipe/config/run.yaml)
# ---- end user-adjustable ----

has_verl() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)' &>/dev/null
}

if [[ -z ${PYTHON:-} ]]; then
    has_verl python3 && PYTHON=python3 || PYTHON=.venv/bin/python # of scripts/setup_cpu.sh, for a dry run
fi
if ! has_verl "$PYTHON"; then
    echo "$PYTHON has no verl: run bash scripts/setup_gpu.sh (scripts/setup_cpu.sh for DRY_RUN=1), or set PYTHON" >&2
    exit 1
fi
name=${MODEL_PATH%/}
name=$(tr '[:upper:]' '[:lower:]' <<<"${name##*/}" | tr -c 'a-z0-9._\n-' _)
case $ADV_ESTIMATOR in
grpo) METHOD=(estimator=grpo) ;;
dr_grpo) METHOD=(algorithm.adv_estimator=grpo) ;;
*) METHOD=(${ADV_ESTIMATOR:+algorithm.adv_estimator="$ADV_ESTIMATOR"}) ;;
esac

DATA=(
    "data.train_files=$(quoted_files "$TRAIN_FILE")" "data.val_files=$(quoted_files "$TEST_FILE")" data.seed="$SEED"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH" data.max_response_length="$MAX_RESPONSE_LENGTH"
)
MODEL=(
    "actor_rollout_ref.model.path=$(quoted "$MODEL_PATH")" actor_rollout_ref.model.lora_rank="$LORA_RANK"
    ${TOKENIZER_PATH:+"actor_rollout_ref.model.tokenizer_path=$(quoted "$TOKENIZER_PATH")"}
)
if ((LORA_RANK)); then
    name+=-lora$LORA_RANK
    MODEL+=(
        actor_rollout_ref.model.lora_alpha=$((2 * LORA_RANK)) actor_rollout_ref.model.target_modules=all-linear
        actor_rollout_ref.rollout.load_format=safetensors # only adapters travel to vLLM
    )
fi
ACTOR=(
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR" actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"
    actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD"
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD"
)
ROLLOUT=(
    actor_rollout_ref.rollout.n="$ROLLOUT_N" actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL"
    actor_rollout_ref.rollout.max_model_len="$whole"
)
TRAINER=(
    "trainer.project_name=$(quoted "$PROJECT_NAME")" "run.model=$(quoted "$name")" "trainer.logger=[$LOGGER]"
    trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.total_training_steps="${TOTAL_STEPS:-50}" trainer.total_epochs="${TOTAL_EPOCHS:-1000}"
    trainer.save_freq="$SAVE_FREQ" trainer.test_freq="$TEST_FREQ"
    ${EXPERIMENT_NAME:+"trainer.experiment_name=$(quoted "$EXPERIMENT_NAME")"}
)

if [[ -n ${TOKENIZER_PATH:-} && ${DRY_RUN:-0} != 1 && ! -e $TOKENIZER_PATH ]]; then
    "$PYTHON" -m grail_advantage.answers.tokenizers "$MODEL_PATH" "$TOKENIZER_PATH"
fi
for list in "$TRAIN_FILE" "$TEST_FILE"; do
    split_list "$list"
    for file in "${files[@]}"; do # a run refuses it
        [[ ${DRY_RUN:-0} != 1 || $file != /* || -e $file ]] ||
            echo "$file is missing; run bash scripts/prepare_data.sh" >&2
    done
done
# fault tolerance (docs/fault_tolerance.md)
export VERL_USE_EXTERNAL_MODULES=recipe.verl_start${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}
exec "$PYTHON" -m verl.trainer.main_ppo --config-path="$PWD/recipe/config" --config-name=grail_trainer like="$LIKE" \
    "${METHOD[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
