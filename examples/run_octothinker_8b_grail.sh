#!/usr/bin/env bash
# GRAIL | OctoThinker-8B-Short-Base, a base model without a chat template of its own | FSDP2 | NVIDIA GPUs
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-OctoThinker/OctoThinker-8B-Short-Base}
SEQUENCES=3
EXTRA=("actor_rollout_ref.model.custom_chat_template='$(cat recipe/base_math.jinja)'")
source examples/run.sh
