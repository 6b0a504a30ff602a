#!/usr/bin/env bash
# GRAIL | training set and benchmarks as parquet files for verl | any machine
# Knobs: PYTHON (an interpreter that has verl; otherwise python3 if it has, and on a machine without GPUs .venv, which is set up)
# Arguments go to `python -m recipe.data.prepare` (--help lists them); the output is data/ in the project unless
# --output-dir names another folder.
#
#   bash scripts/prepare_data.sh                                          # DeepMath and the six benchmarks from the Hugging Face hub
#   bash scripts/prepare_data.sh --train gsm8k_train --benchmarks gsm8k   # GSM8K: its training set and its test set
#   bash scripts/prepare_data.sh --local-dir DIR --train none             # the benchmarks from DIR/NAME.jsonl

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/find_python.sh
source "${project_root}/scripts/find_python.sh"
find_python "${project_root}" prepare_data

PYTHONPATH=${project_root}${PYTHONPATH:+:${PYTHONPATH}} \
    exec "${python}" -m recipe.data.prepare --output-dir "${project_root}/data" "$@"
