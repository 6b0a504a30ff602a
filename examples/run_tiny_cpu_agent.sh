#!/usr/bin/env bash
# Turn credit | Qwen3 architecture, 0.65 M parameters, with a tool | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# The same as run_tiny_cpu_grail.sh with an agent: the model does the worked arithmetic step by step with a tool that checks each
# step, in verl's own tool agent loop, and decides when to stop (recipe/tiny/agent.py). Arguments are Hydra overrides. DRY_RUN=1
# prints the resolved configuration instead of training. The baseline: ADV_ESTIMATOR=grpo.
#
# Knobs: in the block of scripts/train_cpu.sh.

export ADV_ESTIMATOR=${ADV_ESTIMATOR:-turn_rloo} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-184}
export PROMPTS=${PROMPTS:-16} TOTAL_STEPS=${TOTAL_STEPS:-24} TEST_FREQ=${TEST_FREQ:-8} SAVE_FREQ=${SAVE_FREQ:-8}
BASE_MODEL=agent exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/train_cpu.sh" "$@"
