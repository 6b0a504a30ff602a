#!/usr/bin/env bash
# GRAIL | Qwen3-4B | FSDP training | NVIDIA GPUs
#
# Knobs: MODEL_PATH, MAX_RESPONSE_LENGTH here; the others are in examples/common.sh.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-Qwen/Qwen3-4B}
max_response_length=${MAX_RESPONSE_LENGTH:-4096}
# full-length sequences in a micro-batch, estimated for GPUs with 80 GB
micro_batch_sequences=4

# shellcheck source=examples/common.sh
source examples/common.sh

DATA+=(
    # no thinking: the chat template puts an empty <think></think> in front of the response
    +data.apply_chat_template_kwargs.enable_thinking=False
)

run_training "$@"
