#!/usr/bin/env bash
# GRAIL | OctoThinker-3B-Short-Base | FSDP training | NVIDIA GPUs
#
# Settings of the model: recipe/config/model/octothinker_3b.yaml. Knobs: the environment names of recipe/launch.py.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" octothinker_3b "$@"
