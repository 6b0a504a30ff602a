#!/usr/bin/env bash
# GRAIL | OctoThinker-8B-Short-Base | FSDP training | NVIDIA GPUs
#
# Settings of the model: recipe/config/model/octothinker_8b.yaml. Knobs: the environment names of recipe/launch.py.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" octothinker_8b "$@"
