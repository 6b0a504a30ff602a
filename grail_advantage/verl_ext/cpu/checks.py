"""Start-up checks of a CPU run: what the CPU platform cannot do is refused by name before Ray starts."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf


def check_config(config: DictConfig) -> None:
    """Check a run's resolved configuration, for ``VERL_PLATFORM=cpu`` only.

    Raises:
        ValueError: naming the option and the remedy.
    """
    # verl offloads the reference policy to pinned memory (FSDPEngine._build_fsdp_module, forward_only), which torch
    # hands out only next to an accelerator.
    for option in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"):
        if OmegaConf.select(config, option, default=False):
            raise ValueError(f"{option}=True needs a reference policy, which verl cannot hold on the CPU; set it False")
    model = config.actor_rollout_ref.model
    lora_rank = max(model.get("lora_rank", 0), OmegaConf.select(model, "lora.rank", default=0))
    if lora_rank > 0 and not OmegaConf.select(model, "lora.merge", default=False):
        raise ValueError(
            f"a LoRA rank of {lora_rank} needs an adapter in the rollout, which the CPU platform does not load; "
            "set actor_rollout_ref.model.lora.merge=True"
        )
    # verl hands these two options only to its own replay buffer, not to a custom one (PPOTrainer._build_replay_buffer).
    if OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.name") == "PollingReplayBuffer":
        for option in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
            if OmegaConf.select(config, option, default=False):
                raise ValueError(
                    f"{option}=True has no effect with PollingReplayBuffer; set it False, or set "
                    "trainer.v1.sampler.custom_sampler.path and .name to null and accept verl's polling interval of 2 s"
                )
