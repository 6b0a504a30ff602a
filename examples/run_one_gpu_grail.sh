#!/usr/bin/env bash
# GRAIL | Qwen3-0.6B, or another Qwen3 that fits (docs/gpu.md) | FSDP training | one NVIDIA GPU, or two
#
# Settings of the model: recipe/config/model/qwen3_0_6b.yaml. Knobs: the environment names of recipe/launch.py.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" qwen3_0_6b "$@"
