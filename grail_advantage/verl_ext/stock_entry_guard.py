"""Stops verl's stock entry point before Ray starts when it is asked for an estimator that it cannot serve.

Answers ``verl.trainer.main_ppo.main``: it checks its configuration with ``verl.utils.config.validate_config``, which takes any
``algorithm.adv_estimator``, and would find out only after the first rollouts that nobody computed token weights. Can go when
verl lets a registered estimator check the configuration or name the trainer that it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import verl.utils.config

from grail_advantage.registry import methods
from grail_advantage.verl_ext.estimators import start_command

_lifted = False


@contextmanager
def lifted() -> Iterator[None]:
    """For the entry point that does serve these estimators."""
    global _lifted
    _lifted = True
    try:
        yield
    finally:
        _lifted = False


def install() -> None:
    """Make ``validate_config`` refuse token-weight estimators unless the guard is lifted. Does nothing the second time."""
    original = verl.utils.config.validate_config
    if getattr(original, "refuses_token_weights", False):
        return

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        estimator = config.algorithm.adv_estimator
        if estimator in methods() and not _lifted:
            raise ValueError(start_command(estimator))
        original(config, *args, **kwargs)

    validate_config.refuses_token_weights = True
    verl.utils.config.validate_config = validate_config
