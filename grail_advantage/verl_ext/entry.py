"""verl's own entry point with the methods of this project: ``python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grail``.

Answers ``verl.trainer.main_ppo``: its ``main`` takes any ``algorithm.adv_estimator``, and its ``TaskRunnerV1.run`` looks the
trainer up by name in a process of its own. Both call a function that they import by name after verl has loaded this plug-in:

- ``validate_config`` (``main``, before Ray starts): a run with one of these methods is checked first, its trainer mode then
  names the trainer with token weights;
- ``configure_verl_logging`` (the first line of ``TaskRunnerV1.run``, in the task runner's process): the trainers are registered
  there, which would be too much to import in every process that imports verl.

Can go when verl lets a registered estimator check the configuration and name the trainer that it needs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import verl.utils.config
import verl.utils.logging_utils
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from grail_advantage.registry import methods
from grail_advantage.verl_ext.settings import TRAINER_MODULE, import_trainer_module, import_trainers

INSTALLED = "prepares_token_weights"
"""Attribute of the function put in place."""
MODULE_VARIABLE = "GRAIL_ADVANTAGE_TRAINER_MODULE"
"""Carries ``algorithm.token_weights.trainer_module`` into the task runner's process."""


def prepare_run(config: DictConfig) -> None:
    """Check a run with one of these methods, and choose its trainer. Runs with verl's own estimators stay as they are.

    Raises:
        ValueError: what cannot work, naming the option and the remedy.
    """
    from grail_advantage.verl_ext.checks import check_config, check_estimator
    from grail_advantage.verl_ext.trainer_modes import TRAINER_PREFIX

    import_trainer_module(config)
    module = OmegaConf.select(config, TRAINER_MODULE)
    if module:
        option = f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULE_VARIABLE}"
        OmegaConf.update(config, option, module, force_add=True)
    mode = config.trainer.v1.trainer_mode
    if config.algorithm.adv_estimator in methods():
        check_config(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = f"{TRAINER_PREFIX}{mode}"
    elif config.algorithm.adv_estimator not in ADV_ESTIMATOR_REGISTRY:
        check_estimator(config.algorithm.adv_estimator)


def install() -> None:
    """Put both functions in place. Does nothing the second time."""
    validate, configure = verl.utils.config.validate_config, verl.utils.logging_utils.configure_verl_logging
    if hasattr(validate, INSTALLED):
        return

    @functools.wraps(validate)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        prepare_run(config)
        validate(config, *args, **kwargs)

    @functools.wraps(configure)
    def configure_verl_logging() -> None:
        import_trainers(os.environ.get(MODULE_VARIABLE))
        configure()

    setattr(validate_config, INSTALLED, True)
    verl.utils.config.validate_config = validate_config
    verl.utils.logging_utils.configure_verl_logging = configure_verl_logging
