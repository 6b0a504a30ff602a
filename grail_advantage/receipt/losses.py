"""Losses by formula: the effective advantage that a token should receive, and the denominator that its aggregation says.

Shape suffixes: B responses of the rollout batch, b of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Loss:
    """A loss as its settings say. Made by :func:`verl_loss` or :func:`trl_loss`, or by hand for a loop of one's own."""

    name: str
    """For reports, such as ``vanilla`` or ``dapo``."""
    account: str | None = "clip"
    """The formula: a key of ``ACCOUNTS``; ``None`` for an unknown loss, of which the structure alone is checked."""
    aggregation: str = "token-mean"
    """``token-mean``, ``token-sum``, ``seq-mean-token-sum``, ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``."""
    over: str = "update"
    """What the mean is over: ``update``, all responses of an optimiser step; ``micro-batch``, the mean over micro-batches of
    each one's mean (a property that TRL's ``grpo`` or ``bnpo`` declare); ``batch``, the rollout batch's mean over its
    updates (TRL's ``dapo``)."""
    norm: float | None = None
    """The constant of ``seq-mean-token-sum-norm``: tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the formula: ``low``, ``high``, ``cap`` (the dual clip's), ..."""
    kl: str | None = None
    """The estimator of a KL term in the loss: ``k1``, ``k2`` or ``k3``, also with verl's ``+``; ``None`` without one."""
    kl_coef: float = 0.0


def verl_loss(
    mode: str,
    aggregation: str,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
    loss_scale_factor: float | None = None,
    kl: str | None = None,
    kl_coef: float = 0.0,
    **options: Any,
) -> Loss:
    """The loss of verl 0.9.1 of the name ``actor.policy_loss.loss_mode``.

    Args:
        mode: ``loss_mode``; one that is not known here gives a loss of which the structure alone is checked.
        aggregation: ``actor.loss_agg_mode``.
        clip_ratio: ``actor.clip_ratio``; the other names are those of the actor's options too.
        clip_ratio_low: likewise.
        clip_ratio_high: likewise.
        clip_ratio_c: likewise.
        loss_scale_factor: likewise; where it is unset, the width of the padded micro-batch, which pieces give.
        kl: ``actor.kl_loss_type`` where ``actor.use_kl_loss`` is set.
        kl_coef: ``actor.kl_loss_coef``.
        **options: ``tau_pos``, ``tau_neg`` (sapo), ``dro_beta``.
    """
    raise NotImplementedError


def trl_loss(loss_type: str, importance_sampling_level: str = "token", **options: Any) -> Loss:
    """The loss of TRL 1.16 of this ``loss_type``.

    Args:
        loss_type: as in ``GRPOConfig``; an unknown one gives a loss of which the structure alone is checked.
        importance_sampling_level: ``token`` or ``sequence``.
        **options: ``epsilon``, ``epsilon_high``, ``delta``, ``max_completion_length``, ``beta``, ``sapo_temperature_pos``,
            ``sapo_temperature_neg``, named as in ``GRPOConfig``.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class Batch:
    """A rollout batch as the trainer intends it; all ranks' responses, in one order."""

    advantages_BT: torch.Tensor
    """Token advantages, after weighting."""
    mask_BT: torch.Tensor
    """True where a token counts in the loss."""
    old_log_probs_BT: torch.Tensor | None = None
    """As the loss gets them; ``None``: the loss takes the detached log-probabilities themselves (ratio 1)."""
    weights_BT: torch.Tensor | None = None
    """What multiplies each token's loss beside the ratio (verl's ``rollout_is_weights``, TRL's
    ``importance_sampling_ratio``)."""
    ref_log_probs_BT: torch.Tensor | None = None
    """The reference policy's, where the loss has a KL term."""
    left_out_B: torch.Tensor | None = None
    """True for a response that is left out of the updates on purpose; it still counts in the denominators."""
    updates: int = 1
    """Optimiser steps of an epoch."""
    epochs: int = 1
    """How often each response is used."""
    ranks: int = 1
    """Ranks whose gradients are averaged: each one's g is divided by it."""
    on_policy: bool = True
    """The old log-probabilities are those of the policy that the first update trains, so the first ratio is 1."""
    update_of_B: torch.Tensor | None = None
    """(B,) the update of an epoch, from 0, that a left-out response would be in; read only where ``left_out_B`` is given
    and ``updates`` > 1."""
    keys: list[str] | None = None
    """Names of the responses in findings; their numbers without."""
