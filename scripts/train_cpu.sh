# shellcheck shell=bash
# Prepares, trains and reports on a machine without a GPU. Sourced by examples/run_*_cpu_*.sh, which name the model;
# arguments are Hydra overrides. A second start with the same settings resumes (docs/fault_tolerance.md).
#
# $OUTPUT_DIR/seed$SEED gets the SFT-initialised model and its data; below it a folder for each method gets
# metrics.jsonl, tensorboard/, tokens/ (docs/token_dump.md), report.html and checkpoints/; METHOD.log has all output.
# EXPERIMENT_NAME is the name of that folder in place of METHOD.

set -euo pipefail
source scripts/knobs.sh
check_knobs LIKE MODEL_PATH TOKENIZER_PATH TRAIN_FILE TEST_FILE DATA_DIR NNODES NGPUS_PER_NODE PPO_MINI_BATCH_SIZE \
    MAX_PROMPT_LENGTH PPO_MAX_TOKEN_LEN_PER_GPU LORA_RANK OFFLOAD ROLLOUT_TP ROLLOUT_GPU_MEM_UTIL TOTAL_EPOCHS LOGGER \
    PROJECT_NAME

# ---- user-adjustable, with the names of verl's examples ----
ADV_ESTIMATOR=${ADV_ESTIMATOR:-} # grail; uniform: the baseline in the same trainer; dr_grpo, grpo: verl's estimator
OUTPUT_DIR=${OUTPUT_DIR:-outputs/${MODEL}_cpu}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-64}
ROLLOUT_N=${ROLLOUT_N:-8}
ACTOR_LR=${ACTOR_LR:-2e-4}
SEED=${SEED:-0}
TOTAL_STEPS=${TOTAL_STEPS:-12}
SAVE_FREQ=${SAVE_FREQ:-4}
TEST_FREQ=${TEST_FREQ:-4}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-} # the method
# ---- end user-adjustable ----
[[ $EXPERIMENT_NAME != model ]] || stop "EXPERIMENT_NAME=model is the folder of the model; choose another"

OUTPUT_DIR=$(realpath -ms "$OUTPUT_DIR")
folder=$OUTPUT_DIR/seed$SEED
export OUTPUT_DIR VERL_PLATFORM=cpu
# fault tolerance (docs/fault_tolerance.md)
export VERL_USE_EXTERNAL_MODULES=recipe.verl_start${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}
# Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
for ((micro = 128; TRAIN_BATCH_SIZE * ROLLOUT_N % micro; micro--)); do :; done # the most that divide a step's
case $ADV_ESTIMATOR in
grpo) METHOD=(estimator=grpo) ;;
dr_grpo) METHOD=(algorithm.adv_estimator=grpo) ;;
*) METHOD=(${ADV_ESTIMATOR:+algorithm.adv_estimator="$ADV_ESTIMATOR"}) ;;
esac
train=(
    .venv/bin/python -m verl.trainer.main_ppo --config-path="$PWD/recipe/config" --config-name=cpu_trainer
    "${METHOD[@]}" data.train_batch_size="$TRAIN_BATCH_SIZE" data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.seed="$SEED" actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$micro"
    actor_rollout_ref.rollout.n="$ROLLOUT_N" trainer.total_training_steps="$TOTAL_STEPS"
    trainer.save_freq="$SAVE_FREQ" trainer.test_freq="$TEST_FREQ"
    ${EXPERIMENT_NAME:+"trainer.experiment_name=$(quoted "$EXPERIMENT_NAME")"} "${EXTRA[@]}" "$@"
)

if [[ ${DRY_RUN:-0} == 1 ]]; then
    [[ -x .venv/bin/python ]] || { echo "there is no .venv; run bash scripts/setup_cpu.sh first" >&2 && exit 1; }
    exec "${train[@]}"
fi
echo "1/3 environment" >&2
bash scripts/setup_cpu.sh >&2
echo "2/3 problems and model ($SECONDS s)" >&2
mkdir -p "$folder"
# Method, options and overrides are checked, which say the folder of the run.
config=$(DRY_RUN=1 "${train[@]}" 2>"$folder/check.log") || {
    { sed -n '/^[[:alnum:]_.]*Error/,$p' "$folder/check.log" | grep . || tail -n 5 "$folder/check.log"; } >&2
    exit 1
}
flock "$folder" .venv/bin/python -m verl_cpu.tiny.prepare --base-model "$MODEL" --output-dir "$folder" \
    --seed "$SEED" >&2
run_dir=$(.venv/bin/python -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["run"]["folder"])' <<<"$config")
mkdir -p "$(dirname "$run_dir")"
exec 8>>"$run_dir.log" # the run inherits the lock, and holds it as long as it lives
flock --nonblock 8 || { echo "$run_dir belongs to a run that lives; wait for it or end it" >&2 && exit 1; }
if [[ ${FRESH:-0} == 1 && -e $run_dir ]]; then # a new run; the earlier one is moved away
    for ((number = 1; ; number++)); do [[ -e $run_dir.$number ]] || break; done
    mv "$run_dir" "$run_dir.$number"
    echo "FRESH=1: the earlier run is in $run_dir.$number now" >&2
fi
echo "3/3 reinforcement learning; full output: $run_dir.log ($SECONDS s)" >&2
"${train[@]}" >&8 2>&1 &
trap 'kill $! 2>/dev/null || true' EXIT
# A line for each step, from {"step":3,"data":{..., "critic/score/mean":0.5, ...}}.
tail -n 0 -F --pid=$! "$run_dir/metrics.jsonl" 2>/dev/null |
    sed -unE 's/.*"step": ?([0-9]+).*"critic\/score\/mean": ?([0-9.]+).*/  step \1  reward \2/p' || true
wait $! && status=0 || status=$?
if ((status)); then
    { echo "the run ended with status $status; the end of $run_dir.log:" && tail -n 40 "$run_dir.log"; } >&2
    exit 1
fi
trap - EXIT
tail -n 5 "$run_dir.log" | grep "^already finished" || true
echo "  every token's weight, in a browser: $(.venv/bin/python -m grail_advantage.report "$run_dir") ($SECONDS s)" >&2
