#!/usr/bin/env bash
# GRAIL | training set and benchmarks as parquet files for verl | any machine
# Knobs: PYTHON (an interpreter that has the packages; no environment is set up then)
# Arguments go to `python -m recipe.data.prepare` (--help lists them); the output is data/ in the project unless
# --output-dir names another folder.
#
#   bash scripts/prepare_data.sh                                   # everything from the Hugging Face hub
#   bash scripts/prepare_data.sh --local-dir DIR --train none      # the benchmarks from DIR/NAME.jsonl

set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}

if [[ -z ${python} ]]; then
    bash "${project_root}/scripts/setup_cpu.sh"
    python=${project_root}/.venv/bin/python
fi

PYTHONPATH=${project_root}${PYTHONPATH:+:${PYTHONPATH}} \
    exec "${python}" -m recipe.data.prepare --output-dir "${project_root}/data" "$@"
