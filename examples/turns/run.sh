#!/usr/bin/env bash
# turn_rloo | Qwen3-1.7B | an agent loop and rewards by turn of one's own; in this folder, with train.parquet and test.parquet

set -xeuo pipefail

PYTHONPATH=. python3 -m verl.trainer.main_ppo algorithm.adv_estimator=turn_rloo +algorithm.turn_rloo.rewards=turn_rewards \
    +algorithm.turn_rloo.align=turns +algorithm.turn_rloo.outcome=false \
    actor_rollout_ref.rollout.agent.agent_loop_config_path=my_loop.yaml \
    actor_rollout_ref.rollout.agent.default_agent_loop=check_again \
    reward.custom_reward_function.path=my_reward.py actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum \
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=128 \
    actor_rollout_ref.model.path=Qwen/Qwen3-1.7B actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=true "$@"
