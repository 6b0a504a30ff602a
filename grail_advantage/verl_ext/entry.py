"""Start-up of a run by verl's own command: its estimators by name, its checks, and its trainer.

    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grail ...

:func:`prepare_run` and :func:`register_trainers` run inside verl's start-up
(:func:`grail_advantage.verl_ext.patches.wrap_entry`). Runs with verl's own estimators stay as they are.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from grail_advantage.dump.folder_lock import hold
from grail_advantage.method import methods
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.settings import (
    DUMP_FOLDER,
    TRAINER_MODULE,
    TRAINER_PREFIX,
    RunConfig,
    Settings,
    import_trainer_module,
)

MODULE_VARIABLE = "GRAIL_ADVANTAGE_TRAINER_MODULE"
"""Environment variable of the task runner's process with ``algorithm.token_weights.trainer_module``."""


def register_estimators() -> None:
    """Register an estimator with verl for every method; also for methods that were registered since the last call.

    The trainer multiplies the advantages that verl's own estimator gives, since verl treats several outputs of a session
    correctly only under that name. So these run in a trainer without token weights alone, and say so.
    """
    for name in methods():
        if name not in ADV_ESTIMATOR_REGISTRY:  # checks.check_estimator refuses a name that verl has itself
            register_adv_est(name)(_refusing_estimator(name))


def _refusing_estimator(name: str) -> Callable[..., NoReturn]:
    """An estimator for verl's ``register_adv_est`` that raises a ``ValueError`` with the command to start instead."""

    def estimator(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs token weights, which this trainer does not compute; start the run with "
            f"`python3 -m verl.trainer.main_ppo trainer.use_v1=true algorithm.adv_estimator={name} ...`, or see "
            "docs/own_trainer.md for a trainer of your own"
        )

    setattr(estimator, patches.MADE_HERE, True)
    return estimator


def prepare_run(config: DictConfig, *, of_verl: bool = False) -> RunConfig | None:
    """Check a run with a method of this project, and write its trainer into the configuration. Lock the folder of its token
    dump until this process ends.

    Args:
        of_verl: check a run with an estimator of verl's own as well; its caller locks the folders.

    Returns:
        The parsed configuration; ``None`` of a run that is not checked.

    Raises:
        ValueError: a setting that does not work; the message names the option and the remedy.
    """
    from grail_advantage.verl_ext.checks import check_config, check_spelling

    module = OmegaConf.select(config, TRAINER_MODULE)
    import_trainer_module(module)
    if module:
        option = f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULE_VARIABLE}"
        OmegaConf.update(config, option, module, force_add=True)
    register_estimators()
    name, mode = config.algorithm.adv_estimator, config.trainer.v1.trainer_mode
    check_spelling(name)
    run = check_config(config) if of_verl or name in methods() else None
    if not of_verl and isinstance(run, Settings) and run.dump is not None:
        hold(run.dump.folder, "choose another", DUMP_FOLDER)
    if name in methods():
        patches.set_trainer_mode(config, f"{TRAINER_PREFIX}{mode}")
    return run


def register_trainers() -> None:
    """Register the trainers with token weights, and those of the user's module, in the task runner's process. Importing them in
    every process that imports verl would take seconds each."""
    importlib.import_module("grail_advantage.verl_ext.trainers")
    import_trainer_module(os.environ.get(MODULE_VARIABLE))
