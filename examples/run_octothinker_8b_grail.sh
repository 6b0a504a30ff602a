#!/usr/bin/env bash
# GRAIL | OctoThinker-8B-Short-Base | FSDP training | NVIDIA GPUs
#
# Knobs: MODEL_PATH, MAX_RESPONSE_LENGTH here; the others are in examples/common.sh.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-OctoThinker/OctoThinker-8B-Short-Base}
max_response_length=${MAX_RESPONSE_LENGTH:-4096}
# full-length sequences in a micro-batch, estimated for GPUs with 80 GB
micro_batch_sequences=3

# shellcheck source=examples/common.sh
source examples/common.sh

# A base model without a chat template of its own.
chat_template=$(<recipe/chat_templates/base_math.jinja)
MODEL+=(
    actor_rollout_ref.model.custom_chat_template="$(quoted "$chat_template")"
)

run_training "$@"
