#!/usr/bin/env bash
# GRAIL | everything that training needs, into the environment of PYTHON | Linux x86_64 with NVIDIA GPUs
#
# Knobs: PYTHON (python3: an interpreter of a virtual environment), FLASH_ATTN (auto: verl's wheel, or compiled where verl has
#        none; build: compiled), FLASH_ATTN_INDEX (where verl publishes its wheels), MAX_JOBS (compilers at once; otherwise by
#        memory and cores), FLASH_ATTN_CUDA_ARCHS (targets to compile for, as in "80;90"; otherwise the GPUs that are there),
#        ANY_MACHINE (1: install although something is wrong with the machine, such as no GPU while an image is built)
#
#   bash scripts/setup_gpu.sh                        # requirements.lock and this project in editable form
#   bash scripts/setup_gpu.sh --requirements-only    # requirements.lock
#
# The machine is checked before the downloads begin. It may be interrupted and called
# again, and two calls at once take turns.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
flash_attn=${FLASH_ATTN:-auto}
# The first is of verl after 0.9.1, which keeps one index for each torch; the second is the one that 0.9.1 names.
wheelhouse=https://verl-project.github.io/verl-wheelhouse
flash_attn_index=${FLASH_ATTN_INDEX:-$wheelhouse/cu130/torch2.11/simple/ $wheelhouse/simple/}
any_machine=${ANY_MACHINE:-0}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The CUDA of PyPI's torch 2.11.0, and the first driver that runs it.
cuda=13.0
driver_needed=580.65.06
# GB: the wheels by their sizes in the index; unpacked, a bound; objects and temporary files of a build of flash-attn
downloads=5
unpacked=13
build_space=6
# GB of memory to a compiler of flash-attn, which runs four threads
compiler_memory=9

say() {
    echo "setup_gpu: $*" >&2
}

refuse() { # the machine's fault and the remedy
    if [[ $any_machine == 1 ]]; then
        say "continuing with ANY_MACHINE=1 although $*"
    else
        say "$*"
        exit 1
    fi
}

at_least() { # VERSION NEEDED
    [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

locked() { # NAME -> its requirement and hashes
    sed -n "/^$1==/,/[^\\\\]\$/p" requirements.lock
}

ask_python() { # EXPRESSION
    "$python" -c "import os, sys, sysconfig; print($1)"
}

check_python() {
    local version
    if ! version=$(ask_python '"%d.%d" % sys.version_info[:2]' 2>/dev/null); then
        say "PYTHON=$python is no interpreter that runs; name one with PYTHON=/path/to/python3.12"
        exit 1
    fi
    if [[ $version != 3.11 && $version != 3.12 ]]; then
        say "PYTHON=$python is Python $version; requirements.lock is for Python 3.11 and 3.12"
        exit 1
    fi
    if [[ $(ask_python 'sys.prefix == sys.base_prefix and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))') == True ]]; then
        say "PYTHON=$python belongs to the operating system, which lets nothing be installed into it; make an environment with" \
            "$python -m venv venv and set PYTHON=venv/bin/python"
        exit 1
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        say "PYTHON=$python has no pip; run $python -m ensurepip (uv: uv venv --seed)"
        exit 1
    fi
    # Not for installing alone: Triton, which torch.compile and vLLM use, compiles its launchers on the first step.
    if [[ ! -f $(ask_python 'os.path.join(sysconfig.get_path("include"), "Python.h")') ]]; then
        refuse "$python has no headers (Python.h), which Triton needs when training starts; on Debian and Ubuntu they are in" \
            "the package python$version-dev"
    fi
    if ! command -v "${CC:-gcc}" >/dev/null; then
        refuse "there is no C compiler ${CC:-gcc}, which Triton needs when training starts; on Debian and Ubuntu it is in the" \
            "package build-essential"
    fi
}

check_glibc() {
    local here needed
    here=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
    needed=$(sed -n 's/^# needs glibc //p' requirements.lock)
    if ! at_least "$here" "$needed"; then
        refuse "glibc is $here here, and the wheels of requirements.lock need $needed; use the Dockerfile, or an operating" \
            "system as new as that"
    fi
}

check_gpus() { # sets archs
    local gpus driver lowest
    archs=${FLASH_ATTN_CUDA_ARCHS:-}
    if ! command -v nvidia-smi >/dev/null; then
        refuse "there is no nvidia-smi here, so no NVIDIA driver; run this on a machine with GPUs, or set ANY_MACHINE=1 to" \
            "install all the same, as for an image. For a machine without a GPU there is scripts/setup_cpu.sh"
        return
    fi
    if ! gpus=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>&1); then
        refuse "nvidia-smi fails: ${gpus//$'\n'/ }; the driver does not run, which a restart of the machine or a new" \
            "installation of the driver may fix"
        return
    fi
    gpus=$(grep -E '^[0-9.]+, *[0-9.]+ *$' <<<"$gpus" || true)
    if [[ -z $gpus ]]; then
        refuse "nvidia-smi lists no GPU; ask the scheduler for some (Slurm: --gpus-per-node=8), start the container with" \
            "--gpus all, or set ANY_MACHINE=1 to install all the same"
        return
    fi
    driver=$(head -n 1 <<<"$gpus" | cut -d , -f 1)
    if ! at_least "$driver" "$driver_needed"; then
        refuse "the NVIDIA driver is $driver, and CUDA $cuda needs $driver_needed or newer; install a newer driver, or on a" \
            "data-centre GPU the package cuda-compat-${cuda/./-} and set ANY_MACHINE=1"
    fi
    lowest=$(cut -d , -f 2 <<<"$gpus" | tr -d ' ' | sort -V | head -n 1)
    if ! at_least "$lowest" 8.0; then
        refuse "a GPU here has compute capability $lowest, and flash-attn and bfloat16 need 8.0 (Ampere) or newer; use other" \
            "GPUs, or set ANY_MACHINE=1 and leave that one out by CUDA_VISIBLE_DEVICES when training"
    fi
    # flash-attn knows one architecture for each generation: 8.6 and 8.9 run what is compiled for 8.0.
    archs=${archs:-$(cut -d , -f 2 <<<"$gpus" | tr -d ' ' | cut -d . -f 1 | sort -un | sed 's/$/0/' | paste -s -d ';')}
    say "    $(wc -l <<<"$gpus") GPUs, driver $driver"
}

check_disk() { # COMPILING
    local folder mount need free
    local -A needed=()
    local temporary=${TMPDIR:-/tmp} packages cache
    packages=$(ask_python 'sysconfig.get_path("purelib")')
    cache=$("$python" -m pip cache dir 2>/dev/null || echo "")
    wants() { # FOLDER GB
        folder=$1
        while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
        mount=$(df --output=target "$folder" | tail -n 1)
        needed[$mount]=$((${needed[$mount]:-0} + $2))
    }
    # pip downloads everything before it installs anything.
    wants "$packages" "$unpacked"
    wants "$temporary" $((downloads + $1 * build_space))
    [[ -z $cache ]] || wants "$cache" "$downloads"
    for mount in "${!needed[@]}"; do
        need=${needed[$mount]}
        free=$(($(df --output=avail --block-size=1 "$mount" | tail -n 1) / 1000000000))
        if ((free < need)); then
            refuse "$mount has $free GB free, and this takes about $need GB there ($unpacked GB in $packages, the rest while" \
                "it installs in $temporary${cache:+ and $cache}); make room, move TMPDIR or PIP_CACHE_DIR, or set PIP_NO_CACHE_DIR=1"
        fi
    done
}

find_nvcc() { # as torch looks for it
    local home=${CUDA_HOME:-${CUDA_PATH:-}}
    if [[ -n $home ]]; then
        echo "$home/bin/nvcc"
    elif command -v nvcc >/dev/null; then
        command -v nvcc
    else
        echo /usr/local/cuda/bin/nvcc
    fi
}

check_compiler() {
    local nvcc version
    nvcc=$(find_nvcc)
    version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
    if [[ -z $version ]]; then
        say "flash-attn has to be compiled, and there is no nvcc (looked for $nvcc); install the CUDA $cuda toolkit and set" \
            "CUDA_HOME, or use the Dockerfile, or name an index with a wheel of it by FLASH_ATTN_INDEX"
        exit 1
    fi
    if [[ ${version%%.*} != "${cuda%%.*}" ]]; then
        say "flash-attn has to be compiled, and $nvcc is of CUDA $version where torch is built with CUDA $cuda; install the CUDA" \
            "$cuda toolkit and set CUDA_HOME to it"
        exit 1
    fi
}

compilers() { # MAX_JOBS, or as many as cores and memory (of the machine and of the control group) carry
    local memory limit jobs cores
    if [[ -n ${MAX_JOBS:-} ]]; then
        echo "$MAX_JOBS"
        return
    fi
    memory=$(($(getconf _PHYS_PAGES) * $(getconf PAGE_SIZE)))
    limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
    [[ $limit == max ]] || ((limit > memory)) || memory=$limit
    jobs=$((memory / 1000000000 / compiler_memory))
    cores=$(($(nproc) / 2))
    ((jobs <= cores)) || jobs=$cores
    echo $((jobs > 1 ? jobs : 1))
}

has_flash_attn() { # the version of requirements.txt, and it loads
    "$python" -c "
import importlib.metadata, sys
try:
    installed = importlib.metadata.version('flash-attn').partition('+')[0]
    import flash_attn
except Exception:
    sys.exit(1)
sys.exit(installed != '$flash_attn_version')" 2>/dev/null
}

download_wheel() { # of flash-attn, from the first index that has one for this Python, into $scratch
    local index
    for index in $flash_attn_index; do
        if "$python" -m pip -q download --no-deps --only-binary=:all: --no-cache-dir --dest "$scratch" --index-url "$index" \
            "flash-attn==$flash_attn_version" >"$scratch/log" 2>&1; then
            say "    wheel from $index"
            return
        fi
        say "    $index gives none for this Python: $(grep -iE 'error|not find|resolve' "$scratch/log" | tail -n 1)"
    done
    return 1
}

if [[ $# -gt 1 || ${1:---requirements-only} != --requirements-only ]]; then
    say "usage: bash scripts/setup_gpu.sh [--requirements-only]; got $*"
    exit 1
fi
if [[ $flash_attn != auto && $flash_attn != build ]]; then
    say "FLASH_ATTN=$flash_attn is unknown; choose auto or build"
    exit 1
fi
if [[ $any_machine != 0 && $any_machine != 1 ]]; then
    say "ANY_MACHINE=$any_machine must be 0 or 1"
    exit 1
fi
if [[ -n ${MAX_JOBS:-} && ! $MAX_JOBS =~ ^[1-9][0-9]*$ ]]; then
    say "MAX_JOBS=$MAX_JOBS must be a whole number from 1 on"
    exit 1
fi
if [[ $(uname -sm) != "Linux x86_64" ]]; then
    say "requirements.lock is for Linux x86_64, where its packages have wheels; this is $(uname -sm)"
    exit 1
fi

# The lock is on this file, so that no lock file is left.
exec 9<scripts/setup_gpu.sh
if ! flock --nonblock 9; then
    say "waiting for another call to finish"
    flock 9
fi
started=$SECONDS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
flash_attn_version=$(sed -n 's/^flash-attn==//p' requirements.txt)

say "1/5 checking the machine"
check_python
check_glibc
check_gpus
check_disk 0

say "2/5 flash-attn $flash_attn_version"
if has_flash_attn; then
    flash_attn_from=there
    say "    is there"
elif [[ $flash_attn == auto ]] && download_wheel; then
    flash_attn_from=wheel
else
    flash_attn_from=source
    check_compiler
    check_disk 1
    jobs=$(compilers)
    say "    will be compiled for ${archs:-all that it supports}, $jobs at once (MAX_JOBS)"
fi

say "3/5 packages of requirements.lock: downloads about $downloads GB (less what a cache has), takes about $unpacked GB"
# First, because packages without a wheel are built with it.
"$python" -m pip -q install --no-deps --require-hashes -r <(locked setuptools)
"$python" -m pip -q install --no-deps --no-build-isolation --require-hashes -r <(sed '/^flash-attn==/,/[^\\]$/d' requirements.lock)

say "4/5 flash-attn, against that torch"
if [[ $flash_attn_from == wheel ]]; then
    "$python" -m pip -q install --no-deps --force-reinstall --no-index "$scratch"/flash_attn-*.whl
elif [[ $flash_attn_from == source ]]; then
    # Forced, because its set-up would otherwise download a wheel for another CUDA. Without a cache, because pip keeps what it
    # built under the version alone, whatever torch it was built against.
    [[ -z $archs ]] || export FLASH_ATTN_CUDA_ARCHS=$archs
    FLASH_ATTENTION_FORCE_BUILD=TRUE MAX_JOBS=$jobs "$python" -m pip install --no-deps --no-build-isolation --no-cache-dir \
        --no-binary flash-attn --require-hashes -r <(locked flash-attn)
fi
if ! has_flash_attn; then
    say "flash-attn is installed and does not load:" \
        "$("$python" -c 'import flash_attn' 2>&1 | tail -n 1); compile it here with FLASH_ATTN=build"
    exit 1
fi

say "5/5 checking the installation"
if ! complaints=$("$python" -m pip check); then
    say "pip check complains; the environment had other packages, so use a new one:"$'\n'"$complaints"
    exit 1
fi
if [[ ${1:-} != --requirements-only ]]; then
    "$python" -m pip -q install --no-deps --no-build-isolation -e .
    "$python" -c '
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
assert "grail" in ADV_ESTIMATOR_REGISTRY, "the verl plugin of this project did not load"
'
fi
if [[ -n $archs && $any_machine == 0 ]] && [[ $("$python" -c 'import torch; print(torch.cuda.is_available())') != True ]]; then
    say "nvidia-smi lists GPUs and torch sees none; look at CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-} and at the driver"
    exit 1
fi
say "ready after $((SECONDS - started)) s: $python"
