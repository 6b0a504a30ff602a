"""The estimators in verl's registry: token weight times sequence advantage.

Imports verl on use only.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from grail_advantage.methods import methods
from grail_advantage.weighting import apply_token_weights

TOKEN_WEIGHTS = "token_weights"
WEIGHS_TOKENS = "weighs_tokens"
"""Attribute of the estimators made here, which verl's do not have."""

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def register_estimators() -> None:
    """Register an estimator with verl for every method; also for methods that were registered since the last call."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, compute_grpo_outcome_advantage, register_adv_est

    for name in methods():
        if name not in ADV_ESTIMATOR_REGISTRY:  # checks.check_estimator refuses a name that verl has itself
            register_adv_est(name)(weighted_estimator(name, compute_grpo_outcome_advantage))


def start_command(estimator: str) -> str:
    """Returns the message for a trainer that has no token weights: the command to start instead."""
    return (
        f"algorithm.adv_estimator={estimator} needs token weights, which this trainer does not compute; start the run with "
        f"`python3 -m verl.trainer.main_ppo trainer.use_v1=true algorithm.adv_estimator={estimator} ...`, or see "
        "docs/own_trainer.md for a trainer of your own"
    )


def weighted_estimator(name: str, base: AdvantageFn) -> AdvantageFn:
    """An estimator for verl's ``register_adv_est``: ``base`` times the token weights in the configuration.

    verl passes a registered estimator nothing of the batch but rewards, mask, group index and configuration, so the weights
    travel as ``config["token_weights"]``, float (B, T), in a plain mapping (a DictConfig holds no tensors). This route serves
    other trainers that call verl's ``compute_advantage``, and stops those that have no weights. The trainer of
    :mod:`grail_advantage.verl_ext.trainer` multiplies the advantages that verl's own GRPO path gives, because verl treats
    multi-output sessions right only under that name.

    Args:
        name: the estimator's name, for messages.
        base: verl's estimator of the sequence advantage.

    Returns:
        ``estimator(token_level_rewards, response_mask, index, config) -> (advantages, returns)``, both (B, T).
    """

    def estimator(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Any = None,
        config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights_BT = (config or {}).get(TOKEN_WEIGHTS)
        if weights_BT is None:
            raise ValueError(start_command(name))
        advantages_BT, _ = base(
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            index=index,
            norm_adv_by_std_in_grpo=config.get("norm_adv_by_std_in_grpo", True),
        )
        weighted_BT = apply_token_weights(advantages_BT, weights_BT, response_mask)
        return weighted_BT, weighted_BT

    setattr(estimator, WEIGHS_TOKENS, True)
    return estimator
