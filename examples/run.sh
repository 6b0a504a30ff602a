#!/usr/bin/env bash
# GRAIL | any model of recipe/config/model | FSDP training | NVIDIA GPUs
#
#   bash examples/run.sh MODEL [Hydra overrides]
#
# Knobs: PYTHON (an interpreter that has requirements.txt installed; otherwise python3), and the environment names of
#        recipe/launch.py: ADV_ESTIMATOR, MODEL_PATH, NNODES, ...; DRY_RUN=1 prints the configuration and starts nothing.

set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} ]] && ! python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)'; then
    if [[ ${DRY_RUN:-0} != 1 ]]; then
        echo "python3 has no verl; run bash scripts/setup_gpu.sh, or set PYTHON to an interpreter that has it" >&2
        exit 1
    fi
    # A dry run needs no GPU, so the environment for the CPU will do.
    bash scripts/setup_cpu.sh >&2
    python=.venv/bin/python
fi
# The same process, so that it gets this script's signals.
exec "$python" -m recipe.launch "$@"
