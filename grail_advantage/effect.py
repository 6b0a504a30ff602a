"""Does credit reach the policy? The *effect* of an update on a token is the change of its log-probability, in nats at
the sampling temperature: that of the policy after the update less that before it, both by the same forward. A token
weight is meant for its token, but tokens share parameters, so that an update may move a token against its advantage.

Known cases: a single token with advantage A, a step of plain gradient descent of size eta on ``-A log p`` and a small
eta: the effect is ``eta A |grad log p|^2``. The same token in the same place with advantages A and -A: 0. A token whose
logits share no parameter with those of the update: 0."""

import math

import numpy as np
import torch
from torch import Tensor

EFFECT_METRICS = {
    "moved_with_advantage_rate": "share of tokens with `A_t != 0` whose log-probability moved with it",
    "moved_with_advantage_weighted": "likewise, weighted by the size of the change",
    "moved_with_advantage_p50": "likewise, probability before the update at most 0.5",
    "moved_with_advantage_p90": "likewise 0.5 to 0.9",
    "moved_with_advantage_p99": "likewise 0.9 to 0.99",
    "moved_with_advantage_p100": "likewise above 0.99, where changes are tiny",
    "credit_change_correlation": "Spearman's of `A_t` and change, each less its response's mean, where `A_t` varies",
}
"""Figures of a step whose effect is measured, over the responses that the token dump writes."""
# Rounding puts some probabilities above 1, so that the last part has no upper end.
PROBABILITIES = {"p50": (0.0, 0.5), "p90": (0.5, 0.9), "p99": (0.9, 0.99), "p100": (0.99, math.inf)}


def moved_with_advantage(
    advantages: np.ndarray, effect: np.ndarray, mask: np.ndarray
) -> tuple[int, int]:
    """Count the tokens that moved in the direction of their advantage, and those that could: all that train, whose
    effect was measured and whose advantage is not 0. Three arrays of one shape."""
    credited = mask & np.isfinite(effect) & (advantages != 0)
    moved = credited & (np.sign(effect) == np.sign(advantages))
    return int(moved.sum()), int(credited.sum())


def effect_figures(
    advantages: Tensor, effect: Tensor, mask: Tensor, log_probs: Tensor
) -> dict[str, float]:
    """Compute the figures of :data:`EFFECT_METRICS` over responses that were trained on, without those that no token
    has.

    Args:
        advantages: float (B, T): A_t, after weighting.
        effect: float (B, T); NaN where it was not measured.
        mask: bool (B, T): the tokens that train.
        log_probs: float (B, T): before the update.
    """
    figures = {}
    measured = mask & effect.isfinite()
    probability = log_probs.exp()
    parts = {"rate": measured}
    for name, (low, high) in PROBABILITIES.items():
        parts[name] = measured & (probability > low) & (probability <= high)
    for name, part in parts.items():
        moved, credited = moved_with_advantage(advantages.numpy(), effect.numpy(), part.numpy())
        if credited:
            figures[f"moved_with_advantage_{name}"] = moved / credited
    size = torch.where(measured & (advantages != 0), effect.abs().double(), 0.0)
    if size.any():
        along = size[effect.sign() == advantages.sign()].sum()
        figures["moved_with_advantage_weighted"] = float(along / size.sum())
    credit = _less_mean(advantages.double(), measured)
    change = _less_mean(effect.double(), measured)
    # Equal advantages differ from their mean by rounding, whose ranks would mean nothing.
    varies = measured & (credit.abs().amax(dim=1, keepdim=True) > 1e-6)
    correlation = rank_correlation(credit[varies].numpy(), change[varies].numpy())
    if not math.isnan(correlation):
        figures["credit_change_correlation"] = correlation
    return figures


def _less_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Take each response's mean over the mask off its values there; 0 elsewhere."""
    total = torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)
    mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, values - mean, 0.0)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Compute Spearman's correlation of values (N,), equal ones sharing their mean rank; NaN where one of the two does
    not vary."""
    if not len(x) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    # Of 3, 5, 5, 8 the ranks are 1, 2.5, 2.5, 4.
    return (np.cumsum(count) - (count - 1) / 2)[inverse]
