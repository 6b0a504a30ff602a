#!/usr/bin/env bash
# GRAIL | everything that training needs, into the environment of PYTHON | Linux with NVIDIA GPUs
# Knobs: PYTHON (python3), MAX_JOBS (compilers at once for flash-attn; each takes several GB of memory)
#
#   bash scripts/setup_gpu.sh                        # requirements.txt and this project
#   bash scripts/setup_gpu.sh --requirements-only    # requirements.txt

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ $# -gt 1 || ${1:---requirements-only} != --requirements-only ]]; then
    echo "usage: bash scripts/setup_gpu.sh [--requirements-only]; got $*" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
    echo "PYTHON=$python is $("$python" --version 2>&1); the versions in requirements.txt need Python 3.11 or 3.12" >&2
    exit 1
fi

# flash-attn is compiled against the torch that is there, so it comes second and without a build environment of its own.
"$python" -m pip install -r <(grep -v '^flash-attn' requirements.txt)
"$python" -m pip install --no-build-isolation "$(grep '^flash-attn' requirements.txt)"
if [[ ${1:-} == --requirements-only ]]; then
    exit 0
fi
"$python" -m pip install --no-deps -e .
"$python" -c '
import flash_attn, torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
assert "grail" in ADV_ESTIMATOR_REGISTRY, "the verl plugin of this project did not load"
print(f"ready: torch {torch.__version__}, flash-attn {flash_attn.__version__}, {torch.cuda.device_count()} GPUs in sight")
'
