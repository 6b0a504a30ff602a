#!/usr/bin/env bash
# GRAIL | DeepSeek-R1-Distill-Llama-8B | FSDP training | NVIDIA GPUs
#
# Settings of the model: recipe/config/model/r1_distill_llama_8b.yaml. Knobs: the environment names of recipe/launch.py.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" r1_distill_llama_8b "$@"
