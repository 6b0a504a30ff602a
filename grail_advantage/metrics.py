"""Figures that say what the token weights do to a batch.

verl reduces a metric by words that it finds in the name (``max``, ``min``, ``sum``, ``total``), so the names avoid them.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import math

import torch

from grail_advantage.signals.base import RowSelection
from grail_advantage.weighting import BatchWeights

TOP_SHARE = 0.1

METRICS = {
    "answer_found_rate": "share of rows with a complete answer",
    "selected_rate": "share of rows that needed scores",
    "neutral_rate": "share of rows whose every weight is 1",
    "non_finite_rate": "share of rows that fell back to weight 1 over a score that is not finite",
    "average_weight": "mean weight over valid tokens",
    "weight_deviation": "its standard deviation, of the population",
    "clipped_low_rate": "share of the weights from scores that met the map's lower bound, before the row's mass was restored; "
    "0 for a map without one",
    "clipped_high_rate": "likewise the upper bound",
    "effective_sample_ratio": "`(sum w)^2 / (T sum w^2)`, averaged over rows: 1 where all of a row's weights are equal",
    "top_share": "mass at the top: share of the batch's advantage mass `sum |A_t|` on its heaviest tenth of tokens with "
    "`A != 0`",
    "advantage_scale": "`mean |A_t| / mean |A|` over valid tokens",
}
"""The figures of every batch and what they mean."""
GRADIENT_METRICS = {
    "gradient_norm_p10": "10th percentile of the gradient norms of all positions that the pass looked at",
    "gradient_norm_p90": "90th percentile of them",
}
"""Those of a pass with gradients."""
TRAINER_METRICS = {
    "truncated_rate": "share of rows that hit the length limit without an end token",
    "unjudged_rate": "share of rows that train nothing because their reward, or what verl made of it, is not finite",
    "shared_forward_rate": "share of the scored rows whose saliency was taken on the forward of the old log-probabilities",
}
"""Those that the trainer adds."""


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
        response_mask_BT: bool or 0/1. Rows without a valid token, such as synthetic padding, count nowhere.
        advantages_B: one advantage a row, before weighting. One that is not finite counts as 0.
        rows: the selection that the weights were made with.
        gradient_norms: 1-D float32; the gradient norms of all positions that the pass looked at; empty for a signal without
            gradients.

    Returns:
        the figures of ``METRICS``, and with gradient norms those of ``GRADIENT_METRICS``; empty for a batch without a valid
        token.
    """
    mask_BT = response_mask_BT.bool()
    valid_B = mask_BT.any(dim=-1)
    n_rows = int(valid_B.sum())
    if n_rows == 0:
        return {}
    advantages_B = torch.where(advantages_B.isfinite(), advantages_B, 0.0)
    weights_BT = result.weights_BT
    weights_N = weights_BT[mask_BT].double()
    neutral_B = ((weights_BT == 1.0) | ~mask_BT).all(dim=-1)

    def share(rows_B: torch.Tensor) -> float:
        return int((rows_B & valid_B).sum()) / n_rows

    def token_share(part_BT: torch.Tensor) -> float:
        return int(part_BT.sum()) / max(1, int(result.from_scores_BT.sum()))

    row_weights_BT = weights_BT.double()
    square_B = row_weights_BT.square().sum(dim=-1)
    ratio_B = row_weights_BT.sum(dim=-1).square() / (mask_BT.sum(dim=-1) * square_B)
    ratio_B = ratio_B[valid_B & (square_B > 0)]

    mass_BT = weights_BT.double() * advantages_B.double().abs().unsqueeze(-1)
    mass_N = mass_BT[mask_BT & (advantages_B != 0).unsqueeze(-1)]
    unweighted = (mask_BT * advantages_B.double().abs().unsqueeze(-1)).sum()
    heaviest = max(1, round(TOP_SHARE * mass_N.numel()))

    metrics = {
        "answer_found_rate": share(rows.answered_B),
        "selected_rate": share(rows.selected_B),
        "neutral_rate": share(neutral_B),
        "non_finite_rate": share(result.non_finite_B),
        "average_weight": float(weights_N.mean()),
        "weight_deviation": float(weights_N.std(correction=0)),
        "clipped_low_rate": token_share(result.at_lower_bound_BT),
        "clipped_high_rate": token_share(result.at_upper_bound_BT),
        "effective_sample_ratio": float(ratio_B.mean()) if ratio_B.numel() else 0.0,
        "top_share": float(mass_N.topk(heaviest).values.sum() / mass_N.sum()) if mass_N.sum() > 0 else 0.0,
        "advantage_scale": float(mass_N.sum() / unweighted) if unweighted > 0 else 0.0,
    }
    finite_norms = gradient_norms[torch.isfinite(gradient_norms)].double()
    if finite_norms.numel():
        metrics["gradient_norm_p10"] = float(_quantile(finite_norms, 0.1))
        metrics["gradient_norm_p90"] = float(_quantile(finite_norms, 0.9))
    return metrics


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """Nearest-rank quantile. ``torch.quantile`` refuses more than 16 million values, which a large batch exceeds."""
    return values.kthvalue(max(1, math.ceil(q * values.numel()))).values
