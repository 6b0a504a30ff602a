"""From token scores to token weights: which rows need scores, and what GRAIL makes of them.

Source: GRAIL (arXiv 2606.04889). Pure tensor functions, shared by :func:`grail_advantage.compute_token_weights` and the
verl trainer, so that both give the same weights.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.config import GrailConfig
from grail_advantage.reshapers.log_zscore import log_zscore_weights


@dataclass(frozen=True)
class RowSelection:
    """Which rows are which; every field is a bool tensor of shape (B,)."""

    answered_B: torch.Tensor
    """The response has a complete answer span."""
    inside_gate_B: torch.Tensor
    """The gate lets the row's advantage through. Rows with advantage 0 count as inside: no weight of theirs matters."""
    selected_B: torch.Tensor
    """The row's scores can change its token advantages: answered, inside the gate, advantage not 0."""


def select_rows(advantages_B: torch.Tensor, spans: Sequence[AnswerSpan | None], gate: str) -> RowSelection:
    """Find the rows that need a saliency pass. Leaving the others out is exact: their advantages do not depend on scores.

    Args:
        advantages_B: one advantage a row, any floating dtype.
        spans: the rows' answer spans.
        gate: ``wrong``, ``correct`` or ``all``.
    """
    answered_B = torch.tensor([span is not None for span in spans], dtype=torch.bool, device=advantages_B.device)
    positive_B = advantages_B > 0
    inside_gate_B = {"wrong": ~positive_B, "correct": positive_B, "all": torch.ones_like(positive_B)}[gate]
    matters_B = advantages_B != 0
    return RowSelection(answered_B, inside_gate_B | ~matters_B, answered_B & inside_gate_B & matters_B)


def target_range(span: AnswerSpan, target: str) -> tuple[int, int]:
    """Half-open response-token range whose log-likelihood is differentiated: the span, or its content where not empty."""
    if target == "content" and span.content_end > span.content_start:
        return span.content_start, span.content_end
    return span.start, span.end


def align_scores(saliency_P: torch.Tensor, response_length: int, alignment: str) -> torch.Tensor:
    """Assign position saliencies to response tokens.

    Args:
        saliency_P: saliency of consecutive positions, the first being the first response token's predictor position.
            Positions behind the last one given have none: the answer does not depend on them.
        response_length: number of response tokens T.
        alignment: ``predictor``: a token takes the saliency of the position before it; ``token``: of its own position.

    Returns:
        scores_T, same dtype, 0 behind the positions given.
    """
    own = saliency_P[0 if alignment == "predictor" else 1 :][:response_length]
    return torch.cat([own, own.new_zeros(response_length - own.shape[0])])


@dataclass(frozen=True)
class GrailWeights:
    """Token weights of a batch and what the metrics need to know of them; masks are bool, shape (B, T)."""

    weights_BT: torch.Tensor
    """float32; 0 outside the response mask."""
    non_finite_B: torch.Tensor
    """bool (B,); the row had a non-finite score and fell back to weight 1."""
    standardised_BT: torch.Tensor
    """The weight comes from the token's score, not from an override."""
    at_lower_bound_BT: torch.Tensor
    at_upper_bound_BT: torch.Tensor
    """The weight from the score met that clip bound."""


def grail_weights(
    scores_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    spans: Sequence[AnswerSpan | None],
    rows: RowSelection,
    config: GrailConfig,
) -> GrailWeights:
    """GRAIL's token weights.

    Rows that are not selected weigh 1 on every token, except that with ``content_outside_gate`` the answers of rows outside
    the gate get their overrides. A selected row with a non-finite score weighs 1 on every token.

    Args:
        scores_BT: scores aligned to tokens; only the selected rows are read.
        response_mask_BT: bool or 0/1; the tokens that train.
        spans: the rows' answer spans, in response-token indices.
        rows: from :func:`select_rows`.
        config: the options.
    """
    mask_BT = response_mask_BT.bool()
    device = mask_BT.device
    bounds_B4 = torch.tensor(
        [(s.start, s.content_start, s.content_end, s.end) if s is not None else (0, 0, 0, 0) for s in spans],
        dtype=torch.long,
        device=device,
    ).reshape(-1, 4)
    start_B1, content_start_B1, content_end_B1, _ = bounds_B4.unsqueeze(-1).unbind(dim=1)
    index_T = torch.arange(mask_BT.shape[1], device=device)
    reasoning_BT = index_T < start_B1
    content_BT = (index_T >= content_start_B1) & (index_T < content_end_B1)

    non_finite_B = rows.selected_B & (~torch.isfinite(scores_BT) & mask_BT).any(dim=-1)
    scored_B1 = (rows.selected_B & ~non_finite_B).unsqueeze(-1)

    statistics_mask_BT = mask_BT & reasoning_BT if config.statistics == "reasoning" else mask_BT
    from_scores_BT = log_zscore_weights(
        torch.where(scored_B1 & mask_BT, scores_BT.float(), 1.0),
        statistics_mask_BT,
        weight_mean=config.weight_mean,
        weight_std=config.weight_std,
        weight_min=config.weight_min,
        weight_max=config.weight_max,
    )
    weights_BT = torch.where(scored_B1, from_scores_BT, 1.0)

    overridden_B = scored_B1.squeeze(-1)
    if config.content_outside_gate:
        overridden_B = overridden_B | (rows.answered_B & ~rows.inside_gate_B)
    overridden_B1 = overridden_B.unsqueeze(-1)
    weights_BT = torch.where(overridden_B1 & ~reasoning_BT, config.weight_mean, weights_BT)
    weights_BT = torch.where(overridden_B1 & content_BT, config.content_weight, weights_BT)

    weights_BT = torch.where(mask_BT, weights_BT, 0.0)
    if config.normalize_mass:
        # In float64, so that the padding on a row's right, which sets the order of the sum, does not show in its weights.
        total_B1 = weights_BT.double().sum(dim=-1, keepdim=True)
        scale_B1 = torch.where(scored_B1 & (total_B1 > 0), mask_BT.sum(dim=-1, keepdim=True) / total_B1, 1.0)
        weights_BT = (weights_BT * scale_B1).float()

    standardised_BT = scored_B1 & mask_BT & reasoning_BT
    return GrailWeights(
        weights_BT=weights_BT,
        non_finite_B=non_finite_B,
        standardised_BT=standardised_BT,
        at_lower_bound_BT=standardised_BT & (from_scores_BT <= config.weight_min),
        at_upper_bound_BT=standardised_BT & (from_scores_BT >= config.weight_max),
    )


def apply_token_weights(
    advantages_BT: torch.Tensor, weights_BT: torch.Tensor, response_mask_BT: torch.Tensor
) -> torch.Tensor:
    """Token advantages ``A_t = w_t * A``, 0 outside the response mask whatever stands there.

    All of shape (B, T); the weights are detached. Returns the advantages' dtype.
    """
    weighted_BT = advantages_BT * weights_BT.detach().to(advantages_BT.dtype)
    return torch.where(response_mask_BT.bool(), weighted_BT, 0.0)
