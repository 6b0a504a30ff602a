#!/usr/bin/env bash
# Which part of GRAIL does anything? Five arms, seed by seed | Qwen2.5-1.5B-Instruct on GSM8K | verl, or TRL | NVIDIA GPUs
# docs/credit.md says how many seeds, how to compare them, and what to send. A run that has ended is not repeated.
# For verl first: bash scripts/prepare_data.sh --train gsm8k_train --benchmarks gsm8k
# Arguments go to every run: Hydra overrides to verl, options of examples/trl_grail.py to TRL. The other knobs are those
# of run_gsm8k_grail.sh; TRL reads MODEL_PATH, ACTOR_LR, TOTAL_STEPS, ROLLOUT_N, TRAIN_BATCH_SIZE and MAX_RESPONSE_LENGTH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source scripts/knobs.sh
check_knobs EXPERIMENT_NAME ADV_ESTIMATOR SEED
form "verl|trl" "verl or trl" TRAINER
form "(stock|uniform|grail|shuffled|answer)( (stock|uniform|grail|shuffled|answer))*" "names of arms" ARMS
form "[0-9]+( [0-9]+)*" "whole numbers with blanks between them" SEEDS
TRAINER=${TRAINER:-verl}
ARMS=${ARMS:-stock uniform grail shuffled answer}
SEEDS=${SEEDS:-0 1 2 3 4 5}

run_verl() { # ARM, SEED, NAME, ARGUMENTS ...
    local estimator=grail control=()
    case $1 in
    stock) estimator=dr_grpo ;; # verl's own estimator, with this recipe's loss
    uniform) estimator=uniform ;;
    shuffled | answer) control=(algorithm.grail.control="$1") ;;
    esac
    SEED=$2 EXPERIMENT_NAME=$3 ADV_ESTIMATOR=$estimator bash examples/run_gsm8k_grail.sh "${control[@]}" "${@:4}"
}
run_trl() {
    local method=(--method grail)
    case $1 in
    stock) method=(--method none) ;; # TRL's own trainer
    uniform) method=(--method uniform) ;;
    shuffled | answer) method+=(--control "$1") ;;
    esac
    local command=(
        "${PYTHON:-python3}" examples/trl_grail.py "${method[@]}" --seed "$2" --output "$folder" --lora-rank 0
        --model "${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}" --data openai/gsm8k:main --held-out openai/gsm8k:main:test
        --learning-rate "${ACTOR_LR:-1e-6}" --steps "${TOTAL_STEPS:-174}" --rollouts "${ROLLOUT_N:-8}"
        --prompts "${TRAIN_BATCH_SIZE:-128}" --max-response "${MAX_RESPONSE_LENGTH:-1024}" --micro-batch 16
        --eval-every 58 --dump-every 58 --effect-every 58 --save-steps 0 --vllm "${@:4}"
    )
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        echo "${command[*]@Q}"
    else
        rm -rf "$folder" # of a run that broke off
        "${command[@]}"
    fi
}

for seed in $SEEDS; do
    for arm in $ARMS; do
        name=$arm-seed$seed
        folder=outputs/${PROJECT_NAME:-gsm8k}/$name
        [[ $TRAINER == verl ]] || folder=outputs/trl_gsm8k/$name
        [[ ! -e $folder/finished ]] || continue
        "run_$TRAINER" "$arm" "$seed" "$name" "$@"
        [[ ${DRY_RUN:-0} == 1 ]] || touch "$folder/finished"
    done
done
