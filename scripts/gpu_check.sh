#!/usr/bin/env bash
# GRAIL | checks that need a GPU, in independent parts, each under 8 minutes | one NVIDIA GPU
# Knobs: PYTHON (python3; part a needs torch, transformers and pydantic alone, the others what docs/gpu.md says)
#
#   bash scripts/gpu_check.sh                        # all parts
#   bash scripts/gpu_check.sh a b --results DIR      # these, into DIR (outputs/gpu_check)
#   bash scripts/gpu_check.sh --dry                  # on the CPU at toy size
#
# a: token weights in bf16 against fp32, time and memory of the passes. b: training with TRL. c: the training side of the recipe
# with verl's engine. d: a real model with TRL. Results: PART.json, PART.md and PART.log, as
# each part goes. Exit status 0 only where everything that was asked for ran and passed.

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if ! command -v "${python}" >/dev/null; then
    echo "PYTHON=${python} is not a command; name an interpreter that has torch" >&2
    exit 1
fi
parts=() options=() results=${project_root}/outputs/gpu_check seconds=480
while (($#)); do
    case $1 in
    --dry) options+=(--dry) seconds=1920 ;;
    --results) results=$(realpath -m "$2") && shift ;;
    *) parts+=("$1") ;;
    esac
    shift
done
((${#parts[@]})) || parts=(a b c d)
[[ ${python} != */* ]] || python=$(realpath -s "${python}")

# The project's packages from this folder, whatever is installed.
cd "${project_root}"
export PYTHONPATH=${project_root}:${project_root}/packages/verl-cpu${PYTHONPATH:+:${PYTHONPATH}}
mkdir -p "${results}"
failed=0
for part in "${parts[@]}"; do
    status=0
    timeout --kill-after=10 "${seconds}" "${python}" -m benchmarks.gpu_check "${part}" --results "${results}" "${options[@]}" 2>&1 |
        tee "${results}/${part}.log" || status=$?
    ((status != 124)) || echo "${part}: stopped after ${seconds} s; what it had is in ${results}"
    ((status == 0)) || failed=1
done
exit "${failed}"
