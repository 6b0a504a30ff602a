#!/usr/bin/env bash
# GRAIL | Qwen3-4B | FSDP2 | NVIDIA GPUs
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
SEQUENCES=4 # of full length in a micro-batch, estimated for GPUs with 80 GB
# The chat template puts an empty <think></think> in front of the response.
EXTRA=(+data.apply_chat_template_kwargs.enable_thinking=False)
source examples/run.sh
