#!/usr/bin/env bash
# Turn credit | Qwen3 architecture, 0.65 M parameters, with a tool | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# The same as run_tiny_cpu_grail.sh with an agent: the model does the worked arithmetic step by step with a tool that checks
# each step, in verl's own tool agent loop, and decides when to stop (verl_cpu/tiny/agent.py). The baseline: ADV_ESTIMATOR=uniform.

exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/train_cpu.sh" agent_cpu "$@"
