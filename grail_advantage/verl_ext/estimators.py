"""The estimators in verl's registry, by which a configuration names a method.

:mod:`grail_advantage.verl_ext.trainer` multiplies the advantages that verl's own estimator gives, since verl treats several
outputs of a session right only under that name. So the estimators that are registered here run in a trainer without token
weights alone, and say so. Imports verl on use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from grail_advantage.methods import methods

WEIGHS_TOKENS = "weighs_tokens"
"""Attribute of the estimators made here, which verl's do not have."""


def register_estimators() -> None:
    """Register an estimator with verl for every method; also for methods that were registered since the last call."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name in methods():
        if name not in ADV_ESTIMATOR_REGISTRY:  # checks.check_estimator refuses a name that verl has itself
            register_adv_est(name)(refusing_estimator(name))


def refusing_estimator(name: str) -> Callable[..., NoReturn]:
    """An estimator for verl's ``register_adv_est`` that raises a ``ValueError`` with the command to start instead."""

    def estimator(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs token weights, which this trainer does not compute; start the run with "
            f"`python3 -m verl.trainer.main_ppo trainer.use_v1=true algorithm.adv_estimator={name} ...`, or see "
            "docs/own_trainer.md for a trainer of your own"
        )

    setattr(estimator, WEIGHS_TOKENS, True)
    return estimator
