#!/usr/bin/env bash
# GRAIL | evaluation on the benchmarks, or comparison of two evaluations | NVIDIA GPUs or CPU
# Knobs: PYTHON (an interpreter that has the packages, as on a GPU machine; no environment is set up then)
# Arguments go to `python -m recipe.evaluate` (--help lists them); the benchmarks are read from data/ in the project, where
# scripts/prepare_data.sh puts them, unless --data-dir names another folder.
#
#   bash scripts/evaluate.sh --model MODEL_OR_CHECKPOINT --benchmarks aime24,amc23 --output-dir DIR
#   bash scripts/evaluate.sh --compare DIR_OF_GRPO DIR_OF_GRAIL

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}

if [[ -z ${python} ]]; then
    bash "${project_root}/scripts/setup_cpu.sh"
    python=${project_root}/.venv/bin/python
fi

PYTHONPATH=${project_root}${PYTHONPATH:+:${PYTHONPATH}} \
    exec "${python}" -m recipe.evaluate --data-dir "${project_root}/data" "$@"
