"""Start-up of a run by verl's own command: its estimators by name, its checks, and its trainer.

    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grail ...

:func:`start_run` and :func:`register_trainers` run inside verl's start-up
(:func:`grail_advantage.verl_ext.patches.wrap_entry`). Runs with verl's own estimators stay as they are.

The module that ``algorithm.token_weights.trainer_module`` names may have functions of its own beside its trainers:
``check_run(run)`` and ``begin_run(run, config)`` in the process of the command, after the checks and just before Ray
starts, and ``register_trainers()`` in the task runner's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from grail_advantage.method import methods
from grail_advantage.rules import hold
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

    The trainer multiplies the advantages that verl's own estimator gives, since verl treats several outputs of a
    session correctly only under that name. So these run in a trainer without token weights alone, and say so.
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


def start_run(config: DictConfig, validate: Callable[[], None]) -> None:
    """Check a run and begin it, around verl's own check of its configuration.

    With ``DRY_RUN=1`` in the environment a run of this project (:func:`prepare_run`) is checked, its resolved
    configuration is printed as YAML on stdout, and the process exits.

    Args:
        config: of the run.
        validate: verl's own check.

    Raises:
        ValueError: a setting that does not work; the message names the option and the remedy.
    """
    ours = _is_ours(config)
    if ours:
        OmegaConf.resolve(config)  # verl hands ray_kwargs on as they are
    given = OmegaConf.to_yaml(config) if ours and os.environ.get("DRY_RUN") == "1" else ""
    with contextlib.redirect_stdout(sys.stderr) if given else contextlib.nullcontext():
        run = prepare_run(config)
        validate()
    if given:
        print(given)
        sys.exit()
    if run is not None:
        _call(import_trainer_module(run[TRAINER_MODULE]), "begin_run", run, config)
    if isinstance(run, Settings) and run.dump is not None:
        hold(run.dump.folder, "choose another", DUMP_FOLDER)


def _is_ours(config: DictConfig) -> bool:
    return OmegaConf.select(config, TRAINER_MODULE) is not None or config.algorithm.adv_estimator in methods()


def _call(module: ModuleType | None, name: str, *arguments: Any) -> None:
    """Call a function of the module of ``algorithm.token_weights.trainer_module``, if it has one of this name."""
    if hasattr(module, name):
        getattr(module, name)(*arguments)


def prepare_run(config: DictConfig) -> RunConfig | None:
    """Check a run of this project, and write its trainer into the configuration. Of this project are runs with a method
    or with ``algorithm.token_weights.trainer_module``; of others only the estimator's name is looked at.

    Returns:
        The parsed configuration; ``None`` of a run of others.

    Raises:
        ValueError: a setting that does not work; the message names the option and the remedy.
    """
    from grail_advantage.verl_ext.checks import check_config, check_spelling
    from grail_advantage.verl_ext.option_types import check_types

    name, mode = OmegaConf.select(config, TRAINER_MODULE), config.trainer.v1.trainer_mode
    module = import_trainer_module(name)
    if name:
        option = f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULE_VARIABLE}"
        OmegaConf.update(config, option, name, force_add=True)
    register_estimators()
    check_spelling(config.algorithm.adv_estimator)
    if not _is_ours(config):
        return None
    check_types(config)
    run = check_config(config)
    _call(module, "check_run", run)
    if config.algorithm.adv_estimator in methods():
        patches.set_trainer_mode(config, f"{TRAINER_PREFIX}{mode}")
    return run


def register_trainers() -> None:
    """Register the trainers with token weights, and those of the user's module, in the task runner's process. Importing
    them in every process that imports verl would take seconds each."""
    importlib.import_module("grail_advantage.verl_ext.trainers")
    _call(import_trainer_module(os.environ.get(MODULE_VARIABLE)), "register_trainers")
