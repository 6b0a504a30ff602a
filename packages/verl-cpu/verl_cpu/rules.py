"""Rules of the CPU platform (:mod:`grail_advantage.rules`): settings that do not work with ``VERL_PLATFORM=cpu``.

They are about whatever gives the options of a run by their full names, and verl's name for the kind of its trainer as ``kind``.
"""

from __future__ import annotations

from typing import Any

from grail_advantage.rules import Rule

MODE = "trainer.v1.trainer_mode"
RANK, MERGE = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.merge"
OTHER_RANK = "actor_rollout_ref.model.lora.rank"
KERNELS = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
CHECKPOINTS = "actor_rollout_ref.rollout.checkpoint_engine"
SAMPLER = "trainer.v1.sampler.custom_sampler"
_POLLING = "PollingReplayBuffer"
_VERLS_BUFFER = f"set {SAMPLER}.path and .name to null and accept verl's polling interval of 2 s"


def _polls(s: Any) -> bool:
    return s[f"{SAMPLER}.name"] == _POLLING


def _not_handed_on(id: str, option: str) -> Rule:
    """verl hands these options to its own replay buffer alone (``PPOTrainer._build_replay_buffer``)."""
    return Rule(
        id,
        option,
        lambda s: _polls(s) and s[option],
        f"it has no effect with {_POLLING}",
        f"set it False, or {_VERLS_BUFFER}",
        (f"{option}=True",),
    )


REFUSALS = (
    Rule(
        "cpu-adapter",
        lambda s: RANK if s[RANK] else OTHER_RANK,
        lambda s: max(s[RANK] or 0, s[OTHER_RANK] or 0) > 0 and not s[MERGE],
        "the rollout needs the adapter, which the CPU platform does not load",
        f"set {MERGE}=True",
        (f"{RANK}=8",),
    ),
    Rule(
        "cpu-kernels",
        KERNELS,
        lambda s: s["actor_rollout_ref.model.use_fused_kernels"] and s[KERNELS] != "torch",
        "it has no kernel for the CPU",
        "use torch",
        (
            *(f"{KERNELS}=triton", "actor_rollout_ref.actor.strategy=fsdp"),
            "actor_rollout_ref.model.use_fused_kernels=True",
        ),
    ),
    Rule(
        "cpu-trainer",
        MODE,
        lambda s: _polls(s) and s.kind != "sync",
        f"{_POLLING} is of the synchronous trainer",
        _VERLS_BUFFER,
        (f"{MODE}=colocate_async",),
    ),
    Rule(
        "cpu-checkpoints",
        f"{CHECKPOINTS}.backend",
        lambda s: s.kind == "separate_async" and s[f"{CHECKPOINTS}.backend"] != "host",
        "separate_async needs an accelerator for it",
        f"set it to host, and {CHECKPOINTS}.custom_backend_module=grail_advantage.verl_cpu.checkpoint_engine",
        (
            *(f"{CHECKPOINTS}.backend=nccl", f"{MODE}=separate_async", "actor_rollout_ref.rollout.nnodes=1"),
            *("actor_rollout_ref.rollout.n_gpus_per_node=1", "trainer.v1.separate_async.parameter_sync_step=2"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=16", f"{SAMPLER}.path=null", f"{SAMPLER}.name=null"),
        ),
    ),
    _not_handed_on("cpu-group-filter", "algorithm.filter_groups.enable"),
    _not_handed_on("cpu-refill", "trainer.v1.sampler.sync_refill_failed_groups"),
)
