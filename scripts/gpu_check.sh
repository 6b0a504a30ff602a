#!/usr/bin/env bash
# GRAIL | checks that need a GPU, in independent parts | one NVIDIA GPU (two for sequence parallelism)
# Knobs: PYTHON (python3; part a needs torch, transformers, numpy and pydantic alone, the others what docs/gpu.md says)
#
#   bash scripts/gpu_check.sh            # all parts, the most valuable first, each under 8 minutes
#   bash scripts/gpu_check.sh a b        # these
#   bash scripts/gpu_check.sh --dry      # on the CPU at toy size
#
# a: token weights in bf16 against fp32, time and memory of the passes. b: training with TRL. c: the training side of the recipe
# with verl's engine. No hub, no package index and no pytest. Results: PART.json and PART.log as each part goes, and page.md, in the folder of
# --results DIR (outputs/gpu_check). Exit status 0 only where everything that was asked for ran and passed.

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if ! command -v "${python}" >/dev/null; then
    echo "PYTHON=${python} is not a command; name an interpreter that has torch" >&2
    exit 1
fi

# The project's packages from this folder, whatever is installed.
cd "${project_root}"
PYTHONPATH=${project_root}${PYTHONPATH:+:${PYTHONPATH}} exec "${python}" -m benchmarks.gpu_check "$@"
