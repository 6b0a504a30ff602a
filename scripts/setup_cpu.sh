#!/usr/bin/env bash
# GRAIL | environment for everything that runs without a GPU, in .venv at the project's root | Linux x86_64
# Knobs: PYTHON (the interpreter to build it with, 3.11 or 3.12; otherwise one that uv finds, or else downloads),
#        TORCH_CPU_INDEX (where torch's CPU build comes from when pip's index and find-links have none: PyTorch's own)
# uv installs requirements-cpu.txt and, into a folder of its own, requirements-trl.txt, both with hashes; torch's CPU
# build, of which every index has its own; "vllm" of packages/verl-cpu; and this project in editable form: 4 GB,
# one to three minutes. When all is there and unchanged, this returns at once; two calls take turns.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

venv=$PWD/.venv stamp=$PWD/.venv/.setup_cpu.stamp # once all is there: the digest of what it was made from
inputs=(pyproject.toml packages/verl-cpu/pyproject.toml requirements-cpu.txt requirements-trl.txt scripts/setup_cpu.sh
    packages/verl-cpu/vllm-metadata/pyproject.toml)
digest=$({ echo "$PWD" && cat "${inputs[@]}"; } | sha256sum) # the editable install names the project's path
wanted='3.1[12]'
[[ -z ${PYTHON:-} ]] || wanted=$(python_version "$PYTHON" requirements-cpu.txt)

install() { # ARGUMENTS of uv pip install
    "$uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode --no-deps ${UV_NO_INDEX:+--no-index} \
        --build-constraints requirements-cpu.txt "$@"
}

# shellcheck disable=SC2053
[[ -f $stamp && $(python_version "$venv/bin/python") == $wanted ]] && kept=1 || kept=0
((!kept)) || [[ $(<"$stamp") != "$digest" ]] || exit 0
say "downloads about 0.9 GB (less what a cache has), and takes 4 GB in $venv"
PATH=${PATH//"$venv/bin:"/} # .venv may be made anew
find_uv "${PYTHON:-python3}" requirements-cpu.txt
if ((!kept)); then # where an earlier call was interrupted, a package may be there in parts
    "$uv" venv --quiet --clear --relocatable --python "${PYTHON:->=3.11,<3.13}" "$venv" ||
        stop "uv finds no Python 3.11 or 3.12 (name one with PYTHON), can download none, or cannot write $venv"
fi
rm -f "$stamp"

torch=$(grep -o 'torch==[0-9.]*+cpu' pyproject.toml) # the version names the build, so that CUDA's is never taken
say "1 of 4: torch"
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
install "$torch" 2>/dev/null || install --default-index "$index" "$torch" ||
    stop "pip's index and $index have no $torch, or cannot be reached; name another with TORCH_CPU_INDEX"
say "2 of 4, the longest: verl, vLLM, Ray and what they need"
install --require-hashes -r requirements-cpu.txt
say "3 of 4 (after $SECONDS s): TRL, in a folder of its own"
install --require-hashes -r requirements-trl.txt --target "$venv/trl"
say "4 of 4 (after $SECONDS s): this project"
install packages/verl-cpu/vllm-metadata --editable packages/verl-cpu --editable .
# recipe/, bench/ and benchmarks/ are no part of the package; in this environment they can be imported from any folder.
echo "$PWD" >"$(echo "$venv"/lib/python3*/site-packages)/clone_of_grail_advantage.pth"
"$venv/bin/python" -c 'import torch, grail_advantage; assert torch.version.cuda is None, "torch is a CUDA build"'
say "ready after $SECONDS s: $venv"
echo "$digest" >"$stamp"
