#!/usr/bin/env bash
# GRAIL | Qwen3-4B | FSDP training | NVIDIA GPUs
#
# Settings of the model: recipe/config/model/qwen3_4b.yaml. Knobs: the environment names of recipe/launch.py.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" qwen3_4b "$@"
