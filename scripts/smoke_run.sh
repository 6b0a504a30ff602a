#!/usr/bin/env bash
# GRAIL | smoke run: two training steps, a second start, an evaluation of the checkpoint | NVIDIA GPUs, minutes
#
# Everything that a real run goes through, small: rollouts, reward, the method's pass, updates, weight sync, validation,
# checkpoint, the refusal to train a finished run again, merging the checkpoint, evaluation. Prints the claims that this
# proves, and ends with status 0 only where all are proved. The problems are its own, so nothing but the model is downloaded.
#
# Knobs: SCRIPT here, a script of examples/ (run_one_gpu_grail.sh), and all knobs of that script (MODEL_PATH, ADV_ESTIMATOR,
#        NGPUS_PER_NODE, ...), those of lengths, batch and schedule with small defaults. DRY_RUN=1 prints the configuration.
# Arguments are Hydra overrides.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

script=${SCRIPT:-run_one_gpu_grail.sh}
if [[ ! -f examples/$script ]]; then
    echo "SCRIPT=$script is not in examples/" >&2
    exit 1
fi
# shellcheck source=scripts/find_python.sh
source scripts/find_python.sh
find_python "$PWD" "smoke run"
export PYTHON=$python
export PROJECT_NAME=smoke
export EXPERIMENT_NAME=${script%.sh}-${ADV_ESTIMATOR:-grail}
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}
export ROLLOUT_N=${ROLLOUT_N:-4}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-256}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-768}
export TOTAL_STEPS=2 SAVE_FREQ=2 TEST_FREQ=2
export LOGGER=console,file
export DRY_RUN=${DRY_RUN:-0}
run_dir=$PWD/outputs/$PROJECT_NAME/$EXPERIMENT_NAME
export DATA_DIR=$run_dir/data

training=(
    bash "examples/$script"
    trainer.val_before_train=False
    actor_rollout_ref.rollout.val_kwargs.n=1
    # every response of every step, for python -m grail_advantage.report
    algorithm.token_dump.every=1
    "$@"
)
if [[ $DRY_RUN == 1 ]]; then
    exec "${training[@]}"
fi

# An earlier smoke run would be resumed.
"$python" -c 'import pathlib, sys; from recipe.launch import make_room; make_room(pathlib.Path(sys.argv[1]), fresh=False)' "$run_dir"
rm -rf "$run_dir"
mkdir -p "$run_dir"
echo "1/4 problems" >&2
"$python" -m recipe.smoke data "$DATA_DIR" >&2

echo "2/4 two training steps; full output: $run_dir/train.log" >&2
if ! "${training[@]}" >"$run_dir/train.log" 2>&1; then
    tail -n 40 "$run_dir/train.log" >&2
    echo "the training failed; the end of $run_dir/train.log is above" >&2
    exit 1
fi

echo "3/4 the same start again" >&2
if ! "${training[@]}" >"$run_dir/again.log" 2>&1 || ! grep -q "already finished" "$run_dir/again.log"; then
    tail -n 40 "$run_dir/again.log" >&2
    echo "the second start does not report that the run is finished; the end of $run_dir/again.log is above" >&2
    exit 1
fi

echo "4/4 evaluation of the checkpoint; full output: $run_dir/evaluation.log" >&2
if ! bash scripts/evaluate.sh --model "$run_dir/checkpoints/global_step_2" --benchmarks aime24 --data-dir "$DATA_DIR" \
    --samples 1 --max-tokens "$MAX_RESPONSE_LENGTH" --output-dir "$run_dir/evaluation" >"$run_dir/evaluation.log" 2>&1; then
    tail -n 40 "$run_dir/evaluation.log" >&2
    echo "the evaluation failed; the end of $run_dir/evaluation.log is above" >&2
    exit 1
fi

echo "smoke run of examples/$script, ADV_ESTIMATOR=${ADV_ESTIMATOR:-grail}"
echo "  proved      a second start reports that the run is finished  (again.log)"
"$python" -m recipe.smoke report "$run_dir" "$run_dir/evaluation"
