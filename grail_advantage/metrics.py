"""Figures of what token weights do to a batch.

verl reduces a metric by words in its name (``max``, ``min``, ``sum``, ``total``), so the names avoid them.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from grail_advantage.signals.base import RowSelection
from grail_advantage.weighting import BatchWeights

TOP_SHARE = 0.1

METRICS = {
    "answer_found_rate": "share of responses with a complete answer",
    "selected_rate": "share of responses that needed scores",
    "weight_one_rate": "share of responses whose every weight is 1",
    "non_finite_rate": "share of responses that fell back to weight 1 over a score that is not finite; with methods of turns, "
    "that train nothing for it",
    "average_weight": "mean weight over valid tokens",
    "weight_deviation": "its standard deviation, of the population",
    "clipped_low_rate": "share of the weights from scores that met the map's lower bound, before their sum was restored; "
    "0 for a map without one",
    "clipped_high_rate": "likewise the upper bound",
    "effective_sample_ratio": "`(sum w)^2 / (T sum w^2)`, averaged over responses: 1 where a response's weights are equal",
    "top_share": "share of the batch's sum of `|A_t|` on its heaviest tenth of tokens with `A != 0`",
    "advantage_scale": "`mean |A_t| / mean |A|` over valid tokens",
}
"""The figures of every batch and their meanings. A method that gives token advantages has none of ``OF_WEIGHTS``; where the
others speak of weights they mean ``|A_t|``, and a response has weight 1 where every ``A_t`` is its ``A``."""
OF_WEIGHTS = ("average_weight", "weight_deviation", "clipped_low_rate", "clipped_high_rate")
GRADIENT_METRICS = {
    "gradient_norm_p10": "10th percentile of the gradient norms of all positions that the pass looked at",
    "gradient_norm_p90": "90th percentile of them",
}
"""Figures of a pass with gradients."""


def weight_metrics(
    result: BatchWeights,
    response_mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    rows: RowSelection,
    gradient_norms: torch.Tensor,
) -> dict[str, float]:
    """Figures of one batch.

    Args:
        result: the batch's weights.
        response_mask_BT: bool or 0/1. Responses without a valid token, such as synthetic padding, count nowhere.
        advantages_B: one advantage a response, before weighting. One that is not finite counts as 0.
        rows: the selection that the weights were made with.
        gradient_norms: 1-D float32; the gradient norms of all positions that the pass looked at; empty for a signal without
            gradients.

    Returns:
        the figures of ``METRICS``, without ``OF_WEIGHTS`` for a method that gives token advantages, and with gradient norms
        those of ``GRADIENT_METRICS``; empty for a batch without a valid token.
    """
    mask_BT = response_mask_BT.bool().cpu().numpy()
    length_B = np.count_nonzero(mask_BT, axis=1)
    valid_B = length_B > 0
    n_rows = int(valid_B.sum())
    if n_rows == 0:
        return {}
    signed_B = torch.where(advantages_B.isfinite(), advantages_B, 0.0)
    advantages_B = signed_B.double().abs().cpu().numpy()
    if result.given_BT is None:
        weight_BT, scale_B = result.weights_BT.detach().double().cpu().numpy(), advantages_B
        weight_one_BT = weight_BT == 1.0
    else:
        weight_BT = result.given_BT.abs().double().cpu().numpy()
        scale_B = (weight_BT != 0).any(axis=1).astype(np.float64)
        weight_one_BT = (result.given_BT == signed_B.unsqueeze(1)).cpu().numpy()
    weight_one_B = (weight_one_BT | ~mask_BT).all(axis=1)
    sum_B = weight_BT.sum(axis=1)
    square_B = np.einsum("bt,bt->b", weight_BT, weight_BT)

    def share(rows_B: torch.Tensor) -> float:
        return int((rows_B.cpu().numpy() & valid_B).sum()) / n_rows

    from_scores = max(1, int(torch.count_nonzero(result.from_scores_BT)))
    average = sum_B.sum() / length_B.sum()
    # A response's squares about its own mean, and those of its mean about the batch's.
    mean_B = sum_B / np.maximum(length_B, 1)
    centred_BT = (weight_BT - mean_B[:, None]) * mask_BT
    scatter_B = np.einsum("bt,bt->b", centred_BT, centred_BT)
    variance = (scatter_B + length_B * (mean_B - average) ** 2).sum() / length_B.sum()
    weighed_B = valid_B & (square_B > 0)
    ratio_B = sum_B[weighed_B] ** 2 / (length_B[weighed_B] * square_B[weighed_B])
    mass, unweighted = (scale_B * sum_B).sum(), (advantages_B * length_B).sum()
    top = 0.0
    if mass > 0:
        mass_N = (weight_BT * scale_B[:, None])[mask_BT & (scale_B > 0)[:, None]]
        count = max(1, round(TOP_SHARE * len(mass_N)))
        top = float(np.partition(mass_N, -count)[-count:].sum() / mass)

    metrics = {
        "answer_found_rate": share(rows.answered_B),
        "selected_rate": share(rows.selected_B),
        "weight_one_rate": int((weight_one_B & valid_B).sum()) / n_rows,
        "non_finite_rate": share(result.non_finite_B),
        "average_weight": float(average),
        "weight_deviation": math.sqrt(variance),
        "clipped_low_rate": int(torch.count_nonzero(result.at_lower_bound_BT)) / from_scores,
        "clipped_high_rate": int(torch.count_nonzero(result.at_upper_bound_BT)) / from_scores,
        "effective_sample_ratio": float(ratio_B.mean()) if len(ratio_B) else 0.0,
        "top_share": top,
        "advantage_scale": float(mass / unweighted) if unweighted > 0 else 0.0,
    }
    if result.given_BT is not None:
        metrics = {name: value for name, value in metrics.items() if name not in OF_WEIGHTS}
    norms = gradient_norms.detach().cpu().numpy()
    norms = norms[np.isfinite(norms)]
    if len(norms):
        low, high = (max(1, math.ceil(q * len(norms))) - 1 for q in (0.1, 0.9))  # nearest rank
        norms.partition([low, high])
        metrics["gradient_norm_p10"], metrics["gradient_norm_p90"] = float(norms[low]), float(norms[high])
    return metrics
