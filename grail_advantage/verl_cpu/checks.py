"""Start-up checks of a CPU run: settings that do not work on the CPU platform are refused by name before Ray starts."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf


def check_config(config: DictConfig, mode: str) -> None:
    """Check a run's resolved configuration, for ``VERL_PLATFORM=cpu`` only.

    Args:
        config: the configuration.
        mode: verl's name for the kind of trainer.

    Raises:
        ValueError: naming the option and the remedy.
    """
    model = config.actor_rollout_ref.model
    lora_rank = max(model.get("lora_rank", 0), OmegaConf.select(model, "lora.rank", default=0))
    if lora_rank > 0 and not OmegaConf.select(model, "lora.merge", default=False):
        raise ValueError(
            f"a LoRA rank of {lora_rank} needs an adapter in the rollout, which the CPU platform does not load; "
            "set actor_rollout_ref.model.lora.merge=True"
        )
    backend = OmegaConf.select(model, "fused_kernel_options.impl_backend", default=None)
    if model.get("use_fused_kernels", False) and backend != "torch":
        raise ValueError(
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend={backend} has no kernel for the CPU; use torch"
        )
    if OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.name") == "PollingReplayBuffer" and mode != "sync":
        raise ValueError(
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} does not work with PollingReplayBuffer; set "
            "trainer.v1.sampler.custom_sampler.path and .name to null and accept verl's polling interval of 2 s"
        )
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if mode == "separate_async" and engine.backend != "host":
        raise ValueError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={engine.backend} needs an accelerator; set it to host, and "
            "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module="
            "grail_advantage.verl_cpu.checkpoint_engine"
        )
    # verl hands these two options only to its own replay buffer, not to a custom one (PPOTrainer._build_replay_buffer).
    if OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.name") == "PollingReplayBuffer":
        for option in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
            if OmegaConf.select(config, option, default=False):
                raise ValueError(
                    f"{option}=True has no effect with PollingReplayBuffer; set it False, or set "
                    "trainer.v1.sampler.custom_sampler.path and .name to null and accept verl's polling interval of 2 s"
                )
