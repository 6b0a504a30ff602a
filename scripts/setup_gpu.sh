#!/usr/bin/env bash
# GRAIL | everything that training needs, into the environment of PYTHON | Linux x86_64 with NVIDIA GPUs
#
# Knobs: PYTHON (python3: an interpreter of a virtual environment), FLASH_ATTN (auto: verl's wheel, or compiled where verl
#        has none; build: compiled; none: left out, docs/gpu.md), FLASH_ATTN_INDEX (where verl publishes its wheels),
#        MAX_JOBS (compilers at once), FLASH_ATTN_CUDA_ARCHS (targets to compile for, as in "80;90"; otherwise the GPUs that
#        are there), ANY_MACHINE (1: go on although the machine lacks something, as for an image)
#
#   bash scripts/setup_gpu.sh                        # requirements.txt, flash-attn and this project in editable form
#   bash scripts/setup_gpu.sh --requirements-only    # requirements.txt and flash-attn
#
# uv installs requirements.txt with its hashes. flash-attn is the exception: its wheel has to fit the torch that is there,
# PyPI has none, and verl's indexes give no hashes to pin. It may be called again; two calls take turns.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

python=${PYTHON:-python3}
flash_attn=flash-attn==2.8.3 # the source, where it is compiled:
flash_attn_hash=sha256:1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d
# The first is of verl after 0.9.1, which keeps one index for each torch; the second is the one that 0.9.1 names.
verl_wheels=https://verl-project.github.io/verl-wheelhouse
flash_attn_index=${FLASH_ATTN_INDEX:-$verl_wheels/cu130/torch2.11/simple/ $verl_wheels/simple/}

refuse() { # what the machine lacks, and the remedy
    [[ ${ANY_MACHINE:-0} == 1 ]] || stop "$*, or set ANY_MACHINE=1 to install all the same"
    say "continuing with ANY_MACHINE=1: $*"
}

of_gpus() { # PROPERTY -> a line for each GPU; nothing where nvidia-smi finds none
    nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | grep -E '^[0-9.]+ *$' || true
}

check_machine() {
    local driver
    driver=$(of_gpus driver_version | head -n 1)
    if [[ -z $driver ]]; then
        refuse "nvidia-smi shows no GPU; take a machine with GPUs, or scripts/setup_cpu.sh without GPUs"
    elif ((${driver%%.*} < 580)); then
        refuse "the NVIDIA driver is $driver, and CUDA 13.0 needs 580 or newer (or cuda-compat-13-0); install a newer one"
    fi
    # Triton, which torch.compile and vLLM use, compiles its launchers on the first step.
    "$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null &&
        command -v "${CC:-gcc}" >/dev/null ||
        refuse "Triton needs Python.h and a C compiler; install python3-dev and build-essential (Debian and Ubuntu)"
}

install() { # ARGUMENTS of uv pip install
    "$uv" pip install --quiet --python "$python" --no-deps ${UV_NO_INDEX:+--no-index} --build-constraints requirements.txt "$@"
}

has_flash_attn() { # this version, and it loads
    "$python" -c "
import importlib.metadata, flash_attn
assert importlib.metadata.version('flash-attn').partition('+')[0] == '${flash_attn#*==}'" 2>/dev/null
}

install_flash_attn() {
    local index
    [[ ${FLASH_ATTN:-auto} != none ]] && ! has_flash_attn || return 0
    if [[ ${FLASH_ATTN:-auto} == auto ]]; then
        for index in $flash_attn_index; do
            install --only-binary :all: --reinstall-package flash-attn --default-index "$index" "$flash_attn" 2>/dev/null &&
                has_flash_attn && return
        done
    fi
    say "compiling $flash_attn"
    # Forced, because its set-up would otherwise download a wheel for another CUDA. Without a cache, because uv keeps what it
    # built under the version alone, whatever torch it was built against. 8.6 and 8.9 run what is compiled for 8.0.
    export FLASH_ATTENTION_FORCE_BUILD=TRUE
    export FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS:-$(of_gpus compute_cap | sed 's/\..*/0/' | sort -un | paste -s -d ';')}
    [[ -n $FLASH_ATTN_CUDA_ARCHS ]] || unset FLASH_ATTN_CUDA_ARCHS
    install --no-build-isolation --no-cache --reinstall-package flash-attn --no-binary flash-attn --require-hashes \
        -r <(echo "$flash_attn --hash=$flash_attn_hash") && has_flash_attn ||
        stop "flash-attn has no wheel for this machine and cannot be compiled without the CUDA 13.0 toolkit (CUDA_HOME);" \
            "FLASH_ATTN_INDEX names an index with a wheel, FLASH_ATTN=none leaves it out (docs/gpu.md)"
}

[[ $# -le 1 && ${1:---requirements-only} == --requirements-only && ${FLASH_ATTN:-auto} =~ ^(auto|build|none)$ ]] ||
    stop "usage: [FLASH_ATTN=auto|build|none] bash scripts/setup_gpu.sh [--requirements-only]; got $*"
version=$(python_version "$python")
[[ $version == 3.1[12] ]] ||
    stop "requirements.txt needs Python 3.11 or 3.12; PYTHON=$python is ${version:-no interpreter that runs}"
find_uv "$python" requirements.txt
check_machine
say "downloads about 5 GB (less what a cache has), takes about 13 GB"
install --require-hashes -r requirements.txt
install_flash_attn
"$uv" pip check --quiet --python "$python" || stop "the environment had other packages; use a new one"
if [[ ${1:-} != --requirements-only ]]; then
    install --editable .
    "$python" -c '
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
assert "grail" in ADV_ESTIMATOR_REGISTRY, "the verl plugin of this project did not load"'
fi
[[ $("$python" -c 'import torch; print(torch.cuda.is_available())') == True ]] ||
    refuse "torch sees no GPU; look at CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} and at the driver"
say "ready after $SECONDS s: $python"
