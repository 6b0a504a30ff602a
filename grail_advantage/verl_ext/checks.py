"""Start-up checks: what cannot work is refused before Ray starts, with the option's name and the way out."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage.config import GrailConfig
from grail_advantage.estimators import ESTIMATORS
from grail_advantage.verl_ext.cpu import checks as cpu_checks

VERL_VERSION = "0.9.1"
STRATEGIES = ("fsdp", "fsdp2")
TRAINER_MODES = ("sync",)


def check_config(config: DictConfig) -> None:
    """Check a run's resolved configuration.

    Runs with verl's own estimators are only checked for the verl version, its v1 trainer and the estimator's name.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_verl_version(version("verl"))
    if not config.trainer.use_v1:
        raise ValueError(
            f"trainer.use_v1={config.trainer.use_v1}: this entry point starts verl's v1 trainer only; use true, or start "
            "verl's legacy trainer with python3 -m verl.trainer.main_ppo"
        )
    if os.environ.get("VERL_PLATFORM") == "cpu":
        cpu_checks.check_config(config)
    _check_estimator(config.algorithm.adv_estimator)
    if config.algorithm.adv_estimator not in ESTIMATORS:
        return
    GrailConfig.from_dict(OmegaConf.to_container(config.algorithm.grail, resolve=True))
    _check_layout(config)


def check_verl_version(found: str) -> None:
    """The extension follows verl's internals, so another version is refused instead of tried."""
    if found.split("+")[0] != VERL_VERSION:
        raise ValueError(
            f"verl {found} is installed, but this extension follows verl {VERL_VERSION}; "
            f"run `pip install verl=={VERL_VERSION}`"
        )


def _check_estimator(name: str) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    missing = [estimator for estimator in ESTIMATORS if estimator not in ADV_ESTIMATOR_REGISTRY]
    if missing:
        raise ValueError(
            f"the estimators {', '.join(missing)} are not registered with verl: its plugin did not load; unset "
            "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
        )
    if name not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(
            f"algorithm.adv_estimator={name!r} is unknown; choose one of {', '.join(sorted(ADV_ESTIMATOR_REGISTRY))}"
        )


def _check_layout(config: DictConfig) -> None:
    estimator = config.algorithm.adv_estimator
    actor = config.actor_rollout_ref.actor

    def refuse(option: str, value: Any, remedy: str) -> None:
        raise ValueError(f"{option}={value} does not work with algorithm.adv_estimator={estimator}; {remedy}")

    if actor.strategy not in STRATEGIES:
        refuse("actor_rollout_ref.actor.strategy", actor.strategy, f"use {' or '.join(STRATEGIES)}")
    if config.actor_rollout_ref.rollout.n < 2:
        refuse(
            "actor_rollout_ref.rollout.n",
            config.actor_rollout_ref.rollout.n,
            "a group of one has no relative advantage; use 2 or more",
        )
    mode = config.trainer.v1.trainer_mode
    if mode not in TRAINER_MODES:
        refuse("trainer.v1.trainer_mode", mode, f"use {' or '.join(TRAINER_MODES)}")
    sp_size = max(
        OmegaConf.select(actor, name, default=None) or 1
        for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    )
    if sp_size > 1:
        refuse("actor_rollout_ref.actor.ulysses_sequence_parallel_size", sp_size, "use 1")
    if config.actor_rollout_ref.model.get("use_fused_kernels", False):
        refuse("actor_rollout_ref.model.use_fused_kernels", True, "use false: fused kernels give out no logits")
    precision = OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype", default=None)
    if str(precision) in ("fp16", "float16", "16"):
        refuse(
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
            precision,
            "use bf16 or fp32: the answer's gradients underflow in fp16",
        )
    rollout = config.actor_rollout_ref.rollout
    if not rollout.temperature > 0:
        refuse("actor_rollout_ref.rollout.temperature", rollout.temperature, "use a temperature above 0")
