#!/usr/bin/env bash
# GRAIL | evaluation on the benchmarks, grading again, or comparison of two evaluations | NVIDIA GPUs or CPU
# Knobs: PYTHON (an interpreter that has verl and vLLM; otherwise python3 if it has, and on a machine without GPUs .venv, which
#        is set up). Every GPU in sight samples, see --workers
# Arguments go to `python -m recipe.evaluate` (--help lists them); the benchmarks are read from data/ in the project, where
# scripts/prepare_data.sh puts them, unless --data-dir names another folder.
#
#   bash scripts/evaluate.sh --model CHECKPOINT_OR_FOLDER_OR_HUB_ID --benchmarks aime24,amc23 --output-dir DIR
#   bash scripts/evaluate.sh --compare DIR_OF_GRPO DIR_OF_GRAIL
#   bash scripts/evaluate.sh --regrade DIR --grader published

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/find_python.sh
source "${project_root}/scripts/find_python.sh"
find_python "${project_root}" evaluate

PYTHONPATH=${project_root}${PYTHONPATH:+:${PYTHONPATH}} \
    exec "${python}" -m recipe.evaluate --data-dir "${project_root}/data" "$@"
