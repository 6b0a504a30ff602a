"""This module computes figures of what token weights do to a batch. verl reduces a metric by words in its name
(``max``, ``min``, ``sum``, ``total``), so the names avoid them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from grail_advantage.data import Weighed

TOP_SHARE = 0.1

METRICS = {
    "answer_found_rate": "share of responses with an answer",
    "selected_rate": "share of responses that needed scores",
    "weight_one_rate": "share of responses with every weight 1; near 1 the run is `uniform`",
    "non_finite_rate": "share of responses with weight 1 (methods of turns: 0), as a score is not finite",
    "average_weight": "mean weight over valid tokens",
    "weight_deviation": "its population standard deviation",
    "clipped_low_rate": "share of scores' weights at the map's lower bound, before the sum is restored",
    "clipped_high_rate": "likewise the upper bound",
    "effective_sample_ratio": "`(sum w)^2 / (T sum w^2)`, the responses' mean; 1 for equal weights",
    "top_share": "share of the batch's `|A_t|` on the heaviest tenth of tokens with `A != 0`",
    "advantage_scale": "`mean |A_t| / mean |A|`",
    "change_correct_answers": "share of the change, `|A_t - A|`, in the answer's content where `A > 0`",
    "change_incorrect_answers": "likewise where `A < 0`",
    "change_scores": "likewise elsewhere; all three are 0 if nothing changes",
}
"""The figures of every batch and their meanings; those of answers and of the change are of a batch with a tokenizer. A
method that gives token advantages has no mean, deviation and bounds of weights; where the others speak of weights they
mean ``|A_t|``, and a response has weight 1 where every ``A_t`` is its ``A``."""
GRADIENT_METRICS = {
    "gradient_norm_p10": "10th percentile of the pass's gradient norms",
    "gradient_norm_p90": "90th percentile",
}
"""Figures of a pass with gradients."""

CHANGE = ("change_correct_answers", "change_incorrect_answers", "change_scores")


def change_of(change: np.ndarray, base: np.ndarray, content: np.ndarray) -> np.ndarray:
    """Compute the sums, float64 (3,), whose shares are the figures of :data:`CHANGE`.

    Args:
        change: ``|A_t - A|``, 0 where nothing trains.
        base: ``A``, of the same shape or one a response.
        content: bool; the tokens of answers' content.
    """
    correct = content & (base > 0)
    incorrect = content & (base < 0)
    parts = (correct, incorrect, ~(correct | incorrect))
    return np.array([change[part].sum(dtype=np.float64) for part in parts])


def change_shares(sums: np.ndarray) -> dict[str, float]:
    """Compute the figures of :data:`CHANGE`."""
    total = float(sums.sum())
    if total > 0:
        sums = sums / total
    return dict(zip(CHANGE, sums.tolist(), strict=True))


def figures(w: Weighed, norms: torch.Tensor | None) -> dict[str, float]:
    """Compute the figures of one batch; none of one without a token that trains.

    Args:
        w: with the responses as the method saw them. Those without such a token, as synthetic padding, count nowhere.
        norms: 1-D float32; the gradient norms of all positions that the pass looked at, ``None`` without gradients.
    """
    r = w.rollouts
    mask = r.mask.numpy()
    if not mask.any():
        return {}
    length = mask.sum(axis=1)
    valid = length > 0
    base = r.advantages.double().numpy()[:, None]
    if w.gave_advantages:
        # |A_t| takes the place of the weight, and a response's scale is 1 where anything of it trains.
        advantages = w.advantages.double().numpy()
        weight = np.abs(advantages)
        scale = weight.any(axis=1, keepdims=True).astype(np.float64)
        # In float32, as A_t is: next to a float64 A all would differ by rounding.
        change = np.abs(advantages - base.astype(np.float32))
        is_one = change == 0
    else:
        weight = w.weights.double().numpy()
        scale = np.abs(base)
        change = scale * np.abs(weight - 1.0)
        is_one = weight == 1.0

    def share(flags: np.ndarray | torch.Tensor) -> float:
        return float(np.asarray(flags)[valid].mean())

    values = weight[mask]
    total = weight.sum(axis=1)
    square = (weight * weight).sum(axis=1)
    # A response whose weights are all 0 has no ratio.
    weighed = square > 0
    ratio = total[weighed] ** 2 / (length * square)[weighed]
    masses = (weight * scale)[mask & (scale > 0)]
    mass = masses.sum()
    unweighted = (np.abs(base[:, 0]) * length).sum()
    count = max(1, round(TOP_SHARE * len(masses)))
    by_score = max(1, int(w.by_score.sum()))
    batch = {}
    if r.knows_answers:
        batch["answer_found_rate"] = share(r.answered)
    batch["selected_rate"] = share(w.selected)
    batch["weight_one_rate"] = share((is_one | ~mask).all(axis=1))
    batch["non_finite_rate"] = share(w.failed)
    if not w.gave_advantages:
        batch["average_weight"] = float(values.mean())
        batch["weight_deviation"] = float(values.std())
        batch["clipped_low_rate"] = int(w.low.sum()) / by_score
        batch["clipped_high_rate"] = int(w.high.sum()) / by_score
    batch["effective_sample_ratio"] = float(ratio.mean()) if len(ratio) else 0.0
    batch["top_share"] = 0.0
    if mass > 0:
        batch["top_share"] = float(np.partition(masses, -count)[-count:].sum() / mass)
    batch["advantage_scale"] = float(mass / unweighted) if unweighted > 0 else 0.0
    if r.knows_answers:
        batch.update(change_shares(change_of(change * mask, base, r.content.numpy())))
    finite = np.array([]) if norms is None else norms[norms.isfinite()].numpy()
    if len(finite):
        # The nearest rank: of 7 norms the first and the seventh.
        for name, quantile in zip(GRADIENT_METRICS, (0.1, 0.9), strict=True):
            batch[name] = float(np.quantile(finite, quantile, method="inverted_cdf"))
    return batch
