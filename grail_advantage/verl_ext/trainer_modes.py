"""verl's kinds of trainer by name: its own, those with token weights, and those of a user's module.

Imports verl on use only.
"""

from __future__ import annotations

import importlib

TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""verl's own values of ``trainer.v1.trainer_mode``."""
TRAINER_PREFIX = "grail_"
"""Trainer ``grail_<mode>`` is trainer ``<mode>`` with token weights."""
TRAINER_MODULE = "algorithm.token_weights.trainer_module"
"""Option with a module that registers further trainers on import (docs/own_trainer.md)."""


def base_mode(trainer_class: type) -> str:
    """Returns verl's own name for the kind of trainer that a class is."""
    from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync

    if issubclass(trainer_class, PPOTrainerSeparateAsync):
        return "separate_async"
    return "colocate_async" if issubclass(trainer_class, PPOTrainerColocateAsync) else "sync"


def import_trainer_module(name: str | None) -> None:
    """Import the module of ``algorithm.token_weights.trainer_module``, if there is one.

    Raises:
        ValueError: the module cannot be imported.
    """
    if not name:
        return
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{TRAINER_MODULE}={name} failed to import: {type(error).__name__}: {error}") from error
