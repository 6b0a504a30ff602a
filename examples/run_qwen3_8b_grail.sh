#!/usr/bin/env bash
# GRAIL | Qwen3-8B | FSDP2 | NVIDIA GPUs
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
SEQUENCES=3
EXTRA=(+data.apply_chat_template_kwargs.enable_thinking=False)
source examples/run.sh
