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
        advantages_B: one advantage a row, before weighting.
        rows: the selection that the weights were made with.
        gradient_norms: 1-D float32; the gradient norms of all positions that the pass looked at; empty for a signal without
            gradients.

    Returns:
        - ``answer_found_rate``, ``selected_rate``, ``neutral_rate`` (every weight 1), ``non_finite_rate``: shares of rows.
        - ``average_weight``, ``weight_deviation``: mean and standard deviation over valid tokens, population.
        - ``clipped_low_rate``, ``clipped_high_rate``: shares of the weights that come from scores and met a bound of the
          map before the row's mass was restored; 0 for a map without that bound.
        - ``effective_sample_ratio``: ``(sum w)^2 / (T * sum w^2)``, averaged over rows.
        - ``top_share``: share of the batch's advantage mass ``sum |A_t|`` on its heaviest tenth of tokens with ``A != 0``.
        - ``advantage_scale``: ``mean |A_t| / mean |A|`` over valid tokens.
        - ``gradient_norm_p10``, ``gradient_norm_p90``: percentiles; absent without gradients.
    """
    mask_BT = response_mask_BT.bool()
    valid_B = mask_BT.any(dim=-1)
    n_rows = int(valid_B.sum())
    if n_rows == 0:
        return {}
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
