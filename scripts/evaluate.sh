#!/usr/bin/env bash
# GRAIL | evaluation on the benchmarks, grading again, or comparison of two evaluations | NVIDIA GPUs or CPU
# Knobs: PYTHON (an interpreter that has verl and vLLM: python3 if it has verl, else .venv, which is set up)
# Arguments go to `python -m recipe.evaluate` (--help lists them); the benchmarks are those of scripts/prepare_data.sh.
#
#   bash scripts/evaluate.sh --model CHECKPOINT_OR_FOLDER_OR_HUB_ID --benchmarks aime24,amc23 --output-dir DIR
#   bash scripts/evaluate.sh --compare DIR_OF_GRPO DIR_OF_GRAIL
#   bash scripts/evaluate.sh --regrade DIR --grader published

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
has_verl='import sys, importlib.util; sys.exit(not importlib.util.find_spec("verl"))'
if [[ -z ${PYTHON:-} ]] && ! python3 -c "$has_verl" 2>/dev/null; then
    if nvidia-smi -L &>/dev/null; then
        echo "evaluate: python3 has no verl for this machine's GPUs; set PYTHON (docs/gpu.md)" >&2
        exit 1
    fi
    bash "$root/scripts/setup_cpu.sh"
    python=$root/.venv/bin/python
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m recipe.evaluate --data-dir "$root/data" "$@"
