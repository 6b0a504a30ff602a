"""Start-up of a run by verl's own command: its estimators by name, its checks, and its trainer.

    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grail ...

:func:`start_run` and :func:`register_trainers` run inside verl's start-up
(:func:`grail_advantage.verl_ext.patches.wrap_entry`). Runs with verl's own estimators stay as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from grail_advantage.method import methods
from grail_advantage.rules import hold
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.settings import DUMP_FOLDER, TRAINER_MODES, TRAINER_PREFIX, Settings

EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
"""verl's environment variable with modules that it imports in every process, such as those with trainers of one's
own."""


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
            f"algorithm.adv_estimator={name} needs token weights, which this trainer does not compute; start the run "
            f"with `python3 -m verl.trainer.main_ppo algorithm.adv_estimator={name} ...`, or see "
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
    if patches.in_actor():  # the task runner of trainer.use_v1=false asks again
        validate()
        return
    ours = _is_ours(config)
    if ours:
        OmegaConf.resolve(config)  # verl hands ray_kwargs on as they are
    given = OmegaConf.to_yaml(config) if ours and os.environ.get("DRY_RUN") == "1" else ""
    with contextlib.redirect_stdout(sys.stderr) if given else contextlib.nullcontext():
        settings = prepare_run(config)
        validate()
    if given:
        print(given)
        sys.exit()
    if settings is not None:
        for module in patches.STARTS:
            importlib.import_module(module).begin_run(settings, config)
        if settings.dump is not None:
            hold(settings.dump.folder, "choose another", DUMP_FOLDER)


def _is_ours(config: DictConfig) -> bool:
    return bool(patches.STARTS) or config.algorithm.adv_estimator in methods()


def prepare_run(config: DictConfig) -> Settings | None:
    """Check a run of this project, and write its trainer, the whole path of its dump and :data:`EXTERNAL` for Ray's
    processes into the configuration. Of this project are runs with a method, and all in a process with
    :data:`patches.STARTS`; of others only the estimator's name is looked at.

    Returns:
        The parsed configuration; ``None`` of a run of others.

    Raises:
        ValueError: a setting that does not work; the message names the option and the remedy.
    """
    from grail_advantage.verl_ext.checks import check_config, check_spelling

    register_estimators()
    check_spelling(config.algorithm.adv_estimator)
    if not _is_ours(config):
        return None
    settings = check_config(config)
    for module in patches.STARTS:
        importlib.import_module(module).check_run(settings)
    changes = {}
    if modules := os.environ.get(EXTERNAL):
        changes[f"ray_kwargs.ray_init.runtime_env.env_vars.{EXTERNAL}"] = modules
    if settings.dump is not None:  # the trainer runs in another process, with another working folder
        changes[DUMP_FOLDER] = str(settings.dump.folder)
    for option, value in changes.items():
        OmegaConf.update(config, option, value, force_add=True)
    if settings.method is not None and not settings["trainer.use_v1"]:
        patches.use_ray_trainer(importlib.import_module("grail_advantage.verl_ext.ray_trainer").TokenWeightRayTrainer)
    elif settings.method is not None and settings.kind == (mode := config.trainer.v1.trainer_mode) in TRAINER_MODES:
        patches.set_trainer_mode(config, f"{TRAINER_PREFIX}{mode}")
    return settings


def register_trainers() -> None:
    """Register the trainers with token weights, and those of :data:`patches.STARTS`, in the task runner's process.
    Importing them in every process that imports verl would take seconds each."""
    for module in ("grail_advantage.verl_ext.trainers", *patches.STARTS):
        getattr(importlib.import_module(module), "register_trainers", lambda: None)()
