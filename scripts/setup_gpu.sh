#!/usr/bin/env bash
# GRAIL | everything that training needs, into the environment of PYTHON | Linux x86_64 with NVIDIA GPUs
# Knobs: PYTHON (python3: an interpreter of a virtual environment), FLASH_ATTN (auto: verl's wheel, if one fits; none:
#        left out; the launch scripts then take the kernels of torch, docs/gpu.md), FLASH_ATTN_INDEX (where verl publishes its wheels), ANY_MACHINE (1: go on although the machine
#        lacks something, as for an image)
#
#   bash scripts/setup_gpu.sh                        # requirements.txt, flash-attn and this project in editable form
#   bash scripts/setup_gpu.sh --requirements-only    # requirements.txt and flash-attn
#
# uv installs requirements.txt with its hashes; flash-attn's wheel has to fit the torch that is there, and has none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

python=${PYTHON:-python3} flash_attn=flash-attn==2.8.3
wheels=https://verl-project.github.io/verl-wheelhouse
flash_attn_index=${FLASH_ATTN_INDEX:-$wheels/cu130/torch2.11/simple/ $wheels/simple/}

refuse() { # what the machine lacks, and the remedy
    [[ ${ANY_MACHINE:-0} == 1 ]] || stop "$*, or set ANY_MACHINE=1 to install all the same"
    say "continuing with ANY_MACHINE=1: $*"
}

install() { # ARGUMENTS of uv pip install
    "$uv" pip install --quiet --python "$python" --no-deps ${UV_NO_INDEX:+--no-index} \
        --build-constraints requirements.txt "$@"
}

install_flash_attn() {
    local index
    for index in $flash_attn_index; do
        install --only-binary :all: --default-index "$index" "$flash_attn" 2>/dev/null || continue
        "$python" -c 'import flash_attn' 2>/dev/null && return
        "$uv" pip uninstall --quiet --python "$python" flash-attn # of another torch
    done
    say "no index of FLASH_ATTN_INDEX has a wheel of $flash_attn for this torch. The launch scripts take the" \
        "FlashAttention-2 kernels that torch itself has (docs/gpu.md); for flash-attn, name an index that has one, or" \
        "compile it (pip install --no-build-isolation $flash_attn)"
}

[[ $# -le 1 && ${1:---requirements-only} == --requirements-only && ${FLASH_ATTN:-auto} =~ ^(auto|none)$ ]] ||
    stop "usage: [FLASH_ATTN=auto|none] bash scripts/setup_gpu.sh [--requirements-only]; got $*"
python_version "$python" requirements.txt >/dev/null
find_uv "$python" requirements.txt
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -m 1 -E '^[0-9.]+' || true)
if [[ -z $driver ]]; then
    refuse "nvidia-smi shows no GPU; take a machine with GPUs, or scripts/setup_cpu.sh without GPUs"
elif ((${driver%%.*} < 580)); then
    refuse "the NVIDIA driver is $driver, and CUDA 13.0 needs 580 or newer (or cuda-compat-13-0)"
fi
# Triton, which torch.compile and vLLM use, compiles its launchers on the first step.
[[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] &&
    command -v "${CC:-gcc}" >/dev/null ||
    refuse "Triton needs Python.h and a C compiler; install python3-dev and build-essential (Debian and Ubuntu)"
say "downloads about 5 GB (less what a cache has), takes about 13 GB"
install --require-hashes -r requirements.txt
[[ ${FLASH_ATTN:-auto} == none ]] || install_flash_attn
"$uv" pip check --quiet --python "$python" || stop "the environment had other packages; use a new one"
if [[ $# == 0 ]]; then
    install --editable .
    # For log-probabilities without flash-attn. As a distribution it needs more.
    echo "$PWD/packages/verl-cpu" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/verl_cpu_of_clone.pth"
    "$python" -c 'import verl; from grail_advantage.verl_ext.patches import entry_is_wrapped as there; assert there()' ||
        stop "the verl plugin of this project did not load"
fi
[[ $("$python" -c 'import torch; print(torch.cuda.is_available())') == True ]] ||
    refuse "torch sees no GPU; look at CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} and at the driver"
say "ready after $SECONDS s: $python"
