#!/usr/bin/env bash
# Train on this machine without a GPU: start the run, show its progress, report at the end.
#
#   bash scripts/train_cpu.sh RUN_DIR TOTAL_STEPS TITLE [hydra overrides]
#
# RUN_DIR gets train.log (everything that verl, Ray and vLLM print), metrics.jsonl, tensorboard/ and learning_curve.png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run_dir=$1
total_steps=$2
title=$3
shift 3

export VERL_PLATFORM=cpu
export VERL_FILE_LOGGER_PATH="$run_dir/metrics.jsonl"
export TENSORBOARD_DIR="$run_dir/tensorboard"

command=(
    .venv/bin/python -m recipe.main_grail
    --config-name cpu_trainer
    hydra.run.dir="$run_dir/hydra"
    trainer.total_training_steps="$total_steps"
    trainer.default_local_dir="$run_dir/checkpoints"
    trainer.logger='[file,tensorboard]'
    "$@"
)
if [[ "${DRY_RUN:-0}" == 1 ]]; then
    exec "${command[@]}"
fi

# Figures of an earlier run in the same place would be taken for this one's.
rm -rf "$VERL_FILE_LOGGER_PATH" "$TENSORBOARD_DIR"
mkdir -p "$run_dir"
"${command[@]}" >"$run_dir/train.log" 2>&1 &
run_pid=$!
trap 'kill "$run_pid" 2>/dev/null || true' EXIT
echo "training; full output in $run_dir/train.log"
.venv/bin/python -m recipe.run_report watch "$run_dir" --pid "$run_pid" --total-steps "$total_steps"
if ! wait "$run_pid"; then
    echo "the run failed; the end of $run_dir/train.log:" >&2
    tail -n 40 "$run_dir/train.log" >&2
    exit 1
fi
trap - EXIT
.venv/bin/python -m recipe.run_report summary "$run_dir" --title "$title"
