"""Names of verl's trainers, and of those with token weights."""

from __future__ import annotations

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync

TRAINER_PREFIX = "grail_"
"""Trainer ``grail_<mode>`` is trainer ``<mode>`` with token weights."""


def base_mode(trainer_class: type) -> str:
    """Returns verl's own name for the kind of trainer that a class is: ``sync``, ``colocate_async`` or ``separate_async``."""
    if issubclass(trainer_class, PPOTrainerSeparateAsync):
        return "separate_async"
    return "colocate_async" if issubclass(trainer_class, PPOTrainerColocateAsync) else "sync"
