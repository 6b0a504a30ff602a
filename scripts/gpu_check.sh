#!/usr/bin/env bash
# GRAIL | checks that need a GPU, in independent parts, each under 8 minutes | one NVIDIA GPU
# Knobs: PYTHON (python3; part a needs torch, transformers and pydantic alone, the others what docs/gpu.md says)
#
#   bash scripts/gpu_check.sh l                      # before a first training
#   bash scripts/gpu_check.sh                        # all parts
#   bash scripts/gpu_check.sh a c --results DIR      # these, into DIR (outputs/gpu_check)
#   bash scripts/gpu_check.sh --dry                  # on the CPU at toy size
#
# l: the trainer's attention and log-probabilities, then the launch script on a model of 0.65 M parameters, killed and
# resumed. a: token weights in bf16 against fp32, time and memory of the passes. c: the training side of the recipe
# with verl's engine. d: a real model with TRL. Results: PART.md and PART.log, as each part goes.
# Exit status 0 only where everything that was asked for ran and passed.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")") ||
    { echo "PYTHON=${PYTHON:-python3} is not a command; name an interpreter that has torch" >&2 && exit 1; }
parts=() options=() results=$root/outputs/gpu_check seconds=480 failed=0
while (($#)); do
    case $1 in
    --dry) options+=(--dry) seconds=1920 ;;
    --results) results=$(realpath -m "$2") && shift ;;
    *) parts+=("$1") ;;
    esac
    shift
done
((${#parts[@]})) || parts=(l a c d)

cd "$root"
mkdir -p "$results"
# The project's packages from this folder, and their plug-ins of verl, for a clone that is not installed.
export PYTHONPATH=$root:$root/packages/verl-cpu${PYTHONPATH:+:$PYTHONPATH}
export VERL_USE_EXTERNAL_MODULES=grail_advantage.verl_ext.plugin,verl_cpu.plugin
for part in "${parts[@]}"; do
    status=0
    timeout --kill-after=10 "$seconds" "$python" -m benchmarks.gpu_check "$part" --results "$results" \
        "${options[@]}" 2>&1 | tee "$results/$part.log" || status=$?
    ((status != 124)) || echo "$part: stopped after $seconds s; what it had is in $results"
    ((status == 0)) || failed=1
done
exit "$failed"
