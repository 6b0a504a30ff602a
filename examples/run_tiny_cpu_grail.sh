#!/usr/bin/env bash
# GRAIL | Qwen3 architecture, 0.65 M parameters | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# Installs its requirements into .venv, takes the small model that comes with the repository, SFT-initialised on worked
# arithmetic, trains it, and reports. Arguments are Hydra overrides. DRY_RUN=1 prints the configuration.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL=tiny
EXTRA=()
source scripts/train_cpu.sh
