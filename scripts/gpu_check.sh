#!/usr/bin/env bash
# GRAIL | checks that need a GPU, in independent parts | one NVIDIA GPU (two for sequence parallelism)
# Knobs: PYTHON (python3; part a needs torch, transformers, numpy and pydantic alone, the others scripts/setup_gpu.sh's packages)
#
#   bash scripts/gpu_check.sh            # all parts, the most valuable first, each under 8 minutes
#   bash scripts/gpu_check.sh a b        # these
#
# a: token weights in bf16 against fp32, time and memory of the passes. b: the training side of a step with verl's engine, and
# the tests that need a GPU. c: flash attention. d: the smoke run with vLLM. Results: benchmarks/results/gpu_check/*.json and
# docs/gpu_check.md. Exit status 0 only where everything that was asked for ran and passed.

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if ! command -v "${python}" >/dev/null; then
    echo "PYTHON=${python} is not a command; name an interpreter that has torch" >&2
    exit 1
fi

# The project's packages from this folder, whatever is installed.
PYTHONPATH=${project_root}:${project_root}/benchmarks${PYTHONPATH:+:${PYTHONPATH}} \
    exec "${python}" -m gpu_check "$@"
