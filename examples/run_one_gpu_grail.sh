#!/usr/bin/env bash
# GRAIL | Qwen3-0.6B, or another Qwen3 that fits (docs/gpu.md) | FSDP2 | one NVIDIA GPU
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
SEQUENCES=2 # computed for 24 GB, as the next
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.55} # the weights of trainer and engine are on one GPU
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
EXTRA=(+data.apply_chat_template_kwargs.enable_thinking=False)
# Logical ones, of which verl takes 3 a GPU and 3: with fewer, as machines with one GPU may have, a run waits for ever.
[[ -n ${RAY_ADDRESS:-} ]] || EXTRA+=(ray_kwargs.ray_init.num_cpus=$((3 * NGPUS_PER_NODE + 5)))
source examples/run.sh
