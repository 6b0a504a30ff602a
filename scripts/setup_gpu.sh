#!/usr/bin/env bash
# GRAIL | everything that training needs, into the environment of PYTHON | Linux x86_64 with NVIDIA GPUs
#
# Knobs: PYTHON (python3: an interpreter of a virtual environment), FLASH_ATTN (auto: verl's wheel, or compiled where verl has
#        none; build: compiled; none: left out, docs/gpu.md), FLASH_ATTN_INDEX (where verl publishes its wheels), MAX_JOBS (compilers at once; otherwise
#        flash-attn decides by memory and cores), FLASH_ATTN_CUDA_ARCHS (targets to compile for, as in "80;90"; otherwise the GPUs
#        that are there),
#        ANY_MACHINE (1: install although the machine lacks something, such as no GPU while an image is built)
#
#   bash scripts/setup_gpu.sh                        # requirements.txt, flash-attn and this project in editable form
#   bash scripts/setup_gpu.sh --requirements-only    # requirements.txt and flash-attn
#
# uv installs, with the indexes of pip's configuration. The machine is checked before the downloads begin. It may be interrupted and
# called again, and two calls at once take turns.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

python=${PYTHON:-python3}
flash_attn=flash-attn==2.8.3 # the source, where it is compiled:
flash_attn_hash=sha256:1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d
# The first is of verl after 0.9.1, which keeps one index for each torch; the second is the one that 0.9.1 names.
wheelhouse=https://verl-project.github.io/verl-wheelhouse
flash_attn_index=${FLASH_ATTN_INDEX:-$wheelhouse/cu130/torch2.11/simple/ $wheelhouse/simple/}
cuda=13.0 # of PyPI's torch 2.11.0; the first driver that runs it:
driver_needed=580.65.06
unpacked=13 # GB, a bound; 5 GB of downloads

say() {
    echo "setup_gpu: $*" >&2
}

stop() {
    say "$*"
    exit 1
}

refuse() { # the machine's fault and the remedy
    [[ ${ANY_MACHINE:-0} == 1 ]] || stop "$*"
    say "continuing with ANY_MACHINE=1 although $*"
}

at_least() { # VERSION NEEDED
    [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

ask_python() { # EXPRESSION
    "$python" -c "import os, sys, sysconfig; path = sysconfig.get_path; print($1)"
}

check_python() {
    local version
    version=$(python_version "$python")
    [[ $version =~ ^3\.1[12]$ ]] ||
        stop "requirements.txt is for Python 3.11 and 3.12; PYTHON=$python is ${version:-no interpreter that runs}"
    [[ $(ask_python 'sys.prefix == sys.base_prefix and os.path.exists(path("stdlib") + "/EXTERNALLY-MANAGED")') == False ]] ||
        stop "PYTHON=$python belongs to the operating system, which lets nothing be installed into it; make an environment with" \
            "$python -m venv venv and set PYTHON=venv/bin/python"
    # Not for installing alone: Triton, which torch.compile and vLLM use, compiles its launchers on the first step.
    if [[ ! -f $(ask_python 'path("include")')/Python.h ]] || ! command -v "${CC:-gcc}" >/dev/null; then
        refuse "$python has no headers (Python.h) or there is no C compiler ${CC:-gcc}, and Triton needs both when training" \
            "starts; on Debian and Ubuntu they are in python$version-dev and build-essential"
    fi
}

check_gpus() { # sets archs, of the GPUs or of FLASH_ATTN_CUDA_ARCHS
    local said gpus driver
    archs=${FLASH_ATTN_CUDA_ARCHS:-}
    said=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>&1 || true)
    gpus=$(grep -E '^[0-9.]+, *[0-9.]+ *$' <<<"$said" || true)
    if [[ -z $gpus ]]; then
        refuse "nvidia-smi shows no GPU: ${said:-it prints nothing}; take a machine with GPUs (Slurm: --gpus-per-node=8, containers:" \
            "--gpus all), or set ANY_MACHINE=1 to install all the same, as for an image. Without GPUs: scripts/setup_cpu.sh"
        return
    fi
    driver=$(head -n 1 <<<"$gpus" | cut -d , -f 1)
    at_least "$driver" "$driver_needed" ||
        refuse "the NVIDIA driver is $driver, and CUDA $cuda needs $driver_needed or newer; install a newer driver, or on a" \
            "data-centre GPU the package cuda-compat-${cuda/./-} and set ANY_MACHINE=1"
    # flash-attn knows one architecture for each generation: 8.6 and 8.9 run what is compiled for 8.0.
    gpus=$(cut -d , -f 2 <<<"$gpus" | cut -d . -f 1 | tr -d ' ' | sort -un | sed 's/$/0/' | paste -s -d ';')
    ((${gpus%%;*} >= 80)) ||
        refuse "a GPU here has compute capability ${gpus%%0*}, and flash-attn and bfloat16 need 8 (Ampere) or newer; use other" \
            "GPUs, or set ANY_MACHINE=1 and leave that one out by CUDA_VISIBLE_DEVICES when training"
    archs=${archs:-$gpus}
}

check_disk() { # packages are unpacked in uv's cache, and linked from there where that is on the same disk
    local folder
    for folder in "$(ask_python 'path("purelib")')" "$("$uv" cache dir)"; do
        mkdir -p "$folder"
        at_least "$(($(df --output=avail --block-size=1 "$folder" | tail -n 1) / 1000000000))" "$unpacked" ||
            refuse "the disk of $folder has less than the $unpacked GB free that this takes there; make room, or move" \
                "the environment or UV_CACHE_DIR"
    done
}

check_nvcc() { # looks for it as torch does
    local home=${CUDA_HOME:-${CUDA_PATH:-}} nvcc version
    nvcc=${home:+$home/bin/nvcc}
    nvcc=${nvcc:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
    version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
    [[ ${version%%.*} == "${cuda%%.*}" ]] ||
        stop "flash-attn has to be compiled with CUDA $cuda, as torch is, and $nvcc is ${version:-not there}; install the CUDA $cuda" \
            "toolkit and set CUDA_HOME, or use the Dockerfile, or name an index with a wheel of it by FLASH_ATTN_INDEX"
}

install() { # ARGUMENTS of uv pip install
    "$uv" pip install --quiet --python "$python" --no-deps "$@"
}

has_flash_attn() { # this version, and it loads
    "$python" -c "
import importlib.metadata, flash_attn
assert importlib.metadata.version('flash-attn').partition('+')[0] == '${flash_attn#*==}'" 2>/dev/null
}

find_wheel() { # sets wheel_from: the options by which uv finds a wheel of flash-attn for this Python
    local index
    for index in ${UV_NO_INDEX:-$flash_attn_index}; do
        wheel_from=(--only-binary :all:)
        [[ -n ${UV_NO_INDEX:-} ]] || wheel_from+=(--default-index "$index")
        ! install --dry-run "${wheel_from[@]}" "$flash_attn" 2>/dev/null || return 0
    done
    return 1
}

[[ $# -le 1 && ${1:---requirements-only} == --requirements-only ]] ||
    stop "usage: bash scripts/setup_gpu.sh [--requirements-only]; got $*"
[[ ${FLASH_ATTN:-auto} =~ ^(auto|build|none)$ ]] || stop "FLASH_ATTN=$FLASH_ATTN is unknown; choose auto, build or none"
[[ ${ANY_MACHINE:-0} =~ ^[01]$ ]] || stop "ANY_MACHINE=$ANY_MACHINE must be 0 or 1"
[[ $(uname -sm) == "Linux x86_64" ]] || stop "requirements.txt is for Linux x86_64; this is $(uname -sm)"
take_turns scripts/setup_gpu.sh
started=$SECONDS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say "1/4 checking the machine"
check_python
check_gpus
find_uv "$scratch" "$python" requirements.txt
configure_uv "$scratch/venv/bin/python" "$python"
check_disk

say "2/4 $flash_attn"
if [[ ${FLASH_ATTN:-auto} == none ]]; then
    from=nowhere
elif has_flash_attn; then
    from=there
elif [[ ${FLASH_ATTN:-auto} == auto ]] && find_wheel; then
    from=wheel
else
    from=source
    check_nvcc
fi
say "    from: $from${archs:+, for $archs}"

say "3/4 packages of requirements.txt: downloads about 5 GB (less what a cache has), takes about $unpacked GB; then flash-attn"
install --require-hashes --build-constraints requirements.txt -r requirements.txt
if [[ $from == wheel ]]; then
    install --reinstall-package flash-attn "${wheel_from[@]}" "$flash_attn"
elif [[ $from == source ]]; then
    # Forced, because its set-up would otherwise download a wheel for another CUDA. Without a cache, because uv keeps what it built
    # under the version alone, whatever torch it was built against.
    [[ -z $archs ]] || export FLASH_ATTN_CUDA_ARCHS=$archs
    FLASH_ATTENTION_FORCE_BUILD=TRUE install --no-build-isolation --no-cache --reinstall-package flash-attn --no-binary flash-attn \
        --require-hashes -r <(echo "$flash_attn --hash=$flash_attn_hash")
fi
[[ $from == nowhere ]] || has_flash_attn || stop "flash-attn is installed and does not load:" \
    "$("$python" -c 'import flash_attn' 2>&1 | tail -n 1); compile it here with FLASH_ATTN=build"

say "4/4 checking the installation"
complaints=$("$uv" pip check --python "$python" 2>&1) ||
    stop "uv pip check complains; the environment had other packages, so use a new one:"$'\n'"$complaints"
if [[ ${1:-} != --requirements-only ]]; then
    install --build-constraints requirements.txt --editable .
    "$python" -c '
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
assert "grail" in ADV_ESTIMATOR_REGISTRY, "the verl plugin of this project did not load"'
fi
if [[ -n $archs && ${ANY_MACHINE:-0} == 0 ]] && [[ $("$python" -c 'import torch; print(torch.cuda.is_available())') != True ]]; then
    stop "nvidia-smi lists GPUs and torch sees none; look at CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} and at the driver"
fi
say "ready after $((SECONDS - started)) s: $python"
