#!/usr/bin/env bash
# GRAIL | Qwen3-0.6B, or another Qwen3 that fits (docs/gpu.md) | FSDP training | one NVIDIA GPU, or two
#
# Knobs: MODEL_PATH, MAX_RESPONSE_LENGTH here; the others are in examples/common.sh.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
model_path=${MODEL_PATH:-Qwen/Qwen3-0.6B}
max_response_length=${MAX_RESPONSE_LENGTH:-4096}
# full-length sequences in a micro-batch, and vLLM's share of the memory: computed for one GPU with 24 GB
micro_batch_sequences=2
gpu_memory_utilization=0.55

# shellcheck source=examples/common.sh
source examples/common.sh

DATA+=(
    # no thinking: the chat template puts an empty <think></think> in front of the response
    +data.apply_chat_template_kwargs.enable_thinking=False
)
ROLLOUT+=(
    # the weights of trainer and engine are on one GPU
    actor_rollout_ref.rollout.gpu_memory_utilization="$gpu_memory_utilization"
)

run_training "$@"
