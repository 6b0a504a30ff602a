"""All code of this host that replaces verl's, or that reads a private name of verl's; each with its reason.

``tests/verl_ext/test_relied_on.py`` fails where the functions that they answer have changed, and then their reasons may
be gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
import torch
import verl.utils.config
import verl.utils.logging_utils
from omegaconf import DictConfig
from verl.utils.device import get_device_name

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

WRAPPED = "prepares_token_weights"
"""Attribute of a function of verl's that has been wrapped here."""
STARTS: list[str] = []
"""Modules with ``check_run(settings)`` after the checks and ``begin_run(settings, config)`` just before Ray starts,
both in the process of the command, and ``register_trainers()`` in the task runner's. A module of
``VERL_USE_EXTERNAL_MODULES`` adds them."""


def wrap_entry(module: str) -> None:
    """Call two functions of a module, which is imported then: ``start_run`` with the configuration and
    ``verl.utils.config.validate_config``, which it calls in its turn, and ``register_trainers`` before
    ``verl.utils.logging_utils.configure_verl_logging``. Does nothing the second time.

    Works around ``verl.trainer.main_ppo``, which accepts any ``algorithm.adv_estimator`` unchecked, and whose
    ``TaskRunnerV1.run`` looks the trainer up by name in a process of its own. Both import these functions by name after
    verl has loaded its plug-ins: ``main`` calls the first before Ray starts, ``run`` the second in its first line. Can
    go when verl lets a registered estimator check the configuration and name its trainer.
    """
    if entry_is_wrapped():
        return
    validate = verl.utils.config.validate_config
    configure: Any = getattr(verl.utils.logging_utils, "configure_verl_logging", None)

    @functools.wraps(validate)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        validates = functools.partial(validate, config, *args, **kwargs)
        import_module(module).start_run(config, validates)

    setattr(validate_config, WRAPPED, True)
    verl.utils.config.validate_config = validate_config
    # A verl without the v1 trainers has an older one, which needs no registration.
    if configure is None:
        return

    @functools.wraps(configure)
    def configure_verl_logging() -> None:
        import_module(module).register_trainers()
        configure()

    verl.utils.logging_utils.configure_verl_logging = configure_verl_logging


def entry_is_wrapped() -> bool:
    """Whether :func:`wrap_entry` has run in this process."""
    return hasattr(verl.utils.config.validate_config, WRAPPED)


def set_trainer_mode(config: DictConfig, mode: str) -> None:
    """Write verl's own name of a kind of trainer into the configuration.

    Works around ``PPOTrainer._build_replay_buffer`` and five more places of verl, which compare ``trainer_mode`` with
    verl's own names: under another name the trainer silently gets the asynchronous replay buffer. Can go when verl asks
    the class.
    """
    config.trainer.v1.trainer_mode = mode


def base_mode(trainer_class: type) -> str:
    """verl's own name for the kind of trainer that a class is."""
    from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync

    if issubclass(trainer_class, PPOTrainerSeparateAsync):
        return "separate_async"
    return "colocate_async" if issubclass(trainer_class, PPOTrainerColocateAsync) else "sync"


@contextmanager
def base_advantages(algorithm: DictConfig, base: str, *, corrects: bool) -> Iterator[None]:
    """While open, ``algorithm.adv_estimator`` is ``base``, and unless ``corrects``, ``algorithm.rollout_correction`` is
    ``None``.

    The first works around ``verl.trainer.ppo.v1.utils.compute_advantage_for_multi_trajectories``, which counts each
    output of a multi-output session as a session of its own unless the estimator is called ``grpo``, the second around
    ``PPOTrainer._compute_advantage``, which compares the rollout's log-probabilities with the old ones wherever the
    section is there, also where it corrects nothing. Can go when a registered estimator can say that it works by
    sessions, and when verl asks whether it corrects.
    """
    changes: dict[str, Any] = {"adv_estimator": base}
    if not corrects:
        changes["rollout_correction"] = None
    configured = {name: algorithm.get(name) for name in changes}
    algorithm.update(changes)
    try:
        yield
    finally:
        algorithm.update(configured)


def use_ray_trainer(trainer_class: type) -> None:
    """Have verl's older task runner make a trainer of this class.

    Works around ``verl.trainer.main_ppo_v0.TaskRunner.run``, which names ``RayPPOTrainer``. For the process of the
    command: Ray takes the task runner's class from there by value, with the names that its module has then. Can go when
    verl takes the class from its options.
    """
    from verl.trainer import main_ppo_v0

    main_ppo_v0.RayPPOTrainer = trainer_class


@contextmanager
def advantages_by(compute: Callable[..., Any]) -> Iterator[None]:
    """While open, ``RayPPOTrainer.fit`` calls ``compute(compute_advantage, data, **options)`` in place of verl's
    function.

    Works around ``verl.trainer.ppo.ray_trainer.RayPPOTrainer.fit``, which calls the module's ``compute_advantage`` and
    hands a registered estimator neither the responses nor the model. Can go when it is a method of the trainer.
    """
    from verl.trainer.ppo import ray_trainer

    verls = ray_trainer.compute_advantage
    ray_trainer.compute_advantage = functools.partial(compute, verls)
    try:
        yield
    finally:
        ray_trainer.compute_advantage = verls


def in_actor() -> bool:
    """Whether this process is one of Ray's actors; of those that check a configuration, the task runner of
    ``trainer.use_v1=false``."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def autocast(engine: FSDPEngineWithLMHead) -> AbstractContextManager:
    """The autocast of the engine's training step. Can go when ``FSDPEngine._autocast_dtype`` has a public name."""
    if engine._autocast_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)


def gather_packed(
    engine: FSDPEngineWithLMHead, values_N: torch.Tensor, pad_size: int
) -> torch.Tensor:
    """Packed values of all ranks of a sequence-parallel group, without the padding. Can go when
    ``FSDPEngineWithLMHead._gather_and_unpad_packed`` has a public name."""
    return engine._gather_and_unpad_packed(values_N, pad_size)


def data_parallel_size(workers: Any) -> int:
    """Number of workers that get responses of their own; the ranks of a sequence-parallel group get the same. Can go
    when ``RayWorkerGroup._dispatch_info`` has a public name."""
    return max(workers._dispatch_info["actor"]) + 1


def copy_saved_shards(saved_models: dict[int, Any], name: int) -> None:
    """Make parameters that ``DetachActorWorker.save_model_to_cpu`` saved independent of the policy.

    Works around ``verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu``, which copies with ``.cpu()``: that is no copy of a
    parameter in host memory, so that the saved policy would move on with the actor. Can go when verl clones.
    """
    saved = saved_models[name]
    if isinstance(saved, tuple):
        shards, global_spec = saved
        copies = {key: (shard.clone(), spec) for key, (shard, spec) in shards.items()}
        saved_models[name] = (copies, global_spec)
