"""The advantage of a response that token weights multiply: ``algorithm.token_weights.base``, an estimator of verl's registry.

``grpo``, the default, is the one that counts several outputs of a session as one response; with the others verl counts each
output.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from grail_advantage.methods import methods

BASE = "algorithm.token_weights.base"
GRPO = "grpo"
TESTED = (GRPO, "rloo", "opo", "reinforce_plus_plus_baseline")
OTHERS = {
    "gdpo": "it compares parts of the reward, which verl's v1 trainer does not hand to it",
    "gae": "its advantages differ from token to token, and need a critic",
    "reinforce_plus_plus": "its advantages may differ from token to token; use reinforce_plus_plus_baseline",
    "remax": "it needs a further response to each prompt, which verl's v1 trainer does not sample",
    "optimal_token_baseline": "its advantages differ from token to token",
    "tir_optimal_token_baseline": "its advantages differ from token to token",
}
"""Estimators of verl's that cannot be the base, with the reason."""


def base_of(config: DictConfig) -> str:
    """The name of the estimator."""
    return OmegaConf.select(config, BASE, default=None) or GRPO


def check_base(config: DictConfig) -> None:
    """Refuse an estimator that gives no advantage a response, or that lacks what it needs.

    Raises:
        ValueError: naming the option and the remedy.
    """
    base = base_of(config)
    if base in OTHERS:
        raise ValueError(f"{BASE}={base} does not work: {OTHERS[base]}; choose one of {', '.join(TESTED)}")
    if base in methods():
        raise ValueError(f"{BASE}={base} is a method of token weights itself; choose one of {', '.join(TESTED)}")
    if base not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(
            f"{BASE}={base!r} is no estimator of verl's; choose one of {', '.join(TESTED)}, or register yours with "
            "verl.trainer.ppo.core_algos.register_adv_est in the module of algorithm.token_weights.trainer_module"
        )


def check_one_a_response(advantages_BT: torch.Tensor, mask_BT: torch.Tensor, base: str) -> None:
    """Refuse advantages that differ within a response.

    Raises:
        ValueError: naming the option.
    """
    if base in TESTED:
        return
    lowest_B = torch.where(mask_BT, advantages_BT, torch.inf).amin(dim=1)
    highest_B = torch.where(mask_BT, advantages_BT, -torch.inf).amax(dim=1)
    if (lowest_B < highest_B).any():
        raise ValueError(
            f"{BASE}={base} gives the tokens of a response different advantages, and token weights multiply one"
        )
