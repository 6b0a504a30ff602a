"""From token scores to token weights: which rows need scores, and what a method makes of them.

Source: GRAIL (arXiv 2606.04889) and OAR (arXiv 2601.07408). Pure tensor functions, shared by
:func:`grail_advantage.compute_token_weights` and the verl trainer, so that both give the same weights. No method is named
here: any signal's scores go through any reshaper, as the :class:`grail_advantage.config.WeightingOptions` say.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.config import WeightingOptions
from grail_advantage.reshapers.bilevel import FLOOR, bilevel_weights
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


def select_rows(
    advantages_B: torch.Tensor, spans: Sequence[AnswerSpan | None], options: WeightingOptions
) -> RowSelection:
    """Find the rows that need a pass. Leaving the others out is exact: their advantages do not depend on scores.

    Args:
        advantages_B: one advantage a row, any floating dtype.
        spans: the rows' answer spans.
        options: the method's configuration. Where it weighs reasoning tokens alone, a row without any needs no pass.
    """
    device = advantages_B.device
    answered_B = torch.tensor([span is not None for span in spans], dtype=torch.bool, device=device)
    positive_B = advantages_B > 0
    inside_gate_B = {"wrong": ~positive_B, "correct": positive_B, "all": torch.ones_like(positive_B)}[options.gate]
    matters_B = advantages_B != 0
    selected_B = answered_B & inside_gate_B & matters_B
    if options.answer_weights is None and options.statistics == "reasoning":
        reasons_B = torch.tensor(
            [span is not None and span.start > 0 for span in spans], dtype=torch.bool, device=device
        )
        selected_B = selected_B & reasons_B
    return RowSelection(answered_B, inside_gate_B | ~matters_B, selected_B)


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
class BatchWeights:
    """Token weights of a batch and what the metrics need to know of them; masks are bool, shape (B, T)."""

    weights_BT: torch.Tensor
    """float32; 0 outside the response mask."""
    non_finite_B: torch.Tensor
    """bool (B,); the row had a non-finite score and fell back to weight 1."""
    from_scores_BT: torch.Tensor
    """The weight comes from the token's score, not from an override."""
    at_lower_bound_BT: torch.Tensor
    at_upper_bound_BT: torch.Tensor
    """The weight from the score met that bound of the reshaper."""


def batch_weights(
    scores_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    spans: Sequence[AnswerSpan | None],
    rows: RowSelection,
    options: WeightingOptions,
) -> BatchWeights:
    """A batch's token weights: scores through the reshaper, then the method's own answer weights, then the row's mass.

    Rows that are not selected weigh 1 on every token, except that ``answer_weights.outside_gate`` extends the answer weights to
    rows outside the gate. A selected row with a non-finite score weighs 1 on every token.

    Args:
        scores_BT: scores aligned to tokens; read only in selected rows, and there only in the statistics set where the method
            has no answer weights.
        response_mask_BT: bool or 0/1; the tokens that train.
        spans: the rows' answer spans, in response-token indices.
        rows: from :func:`select_rows`.
        options: the method's configuration.
    """
    mask_BT = response_mask_BT.bool()
    reasoning_BT, content_BT = _answer_parts(spans, mask_BT)
    answer = options.answer_weights
    statistics_BT = mask_BT & reasoning_BT if options.statistics == "reasoning" else mask_BT
    weighed_BT = (
        statistics_BT if answer is None else mask_BT
    )  # the tokens that the method weighs, by score or otherwise

    non_finite_B = rows.selected_B & (~torch.isfinite(scores_BT) & weighed_BT).any(dim=-1)
    scored_B1 = (rows.selected_B & ~non_finite_B).unsqueeze(-1)
    from_scores_BT = scored_B1 & (statistics_BT if answer is None else mask_BT & reasoning_BT)

    known_BT = torch.where(scored_B1 & weighed_BT, scores_BT.float(), 1.0)
    reshaped_BT, lowest, highest = _reshape(known_BT, statistics_BT, options)
    weights_BT = torch.where(from_scores_BT, reshaped_BT, 1.0)
    if answer is not None:
        overridden_B = scored_B1.squeeze(-1)
        if answer.outside_gate:
            overridden_B = overridden_B | (rows.answered_B & ~rows.inside_gate_B)
        overridden_B1 = overridden_B.unsqueeze(-1)
        weights_BT = torch.where(overridden_B1 & ~reasoning_BT, answer.others, weights_BT)
        weights_BT = torch.where(overridden_B1 & content_BT, answer.content, weights_BT)
    if options.normalize_mass:
        weights_BT = _restore_mass(weights_BT, scored_B1 & weighed_BT)

    return BatchWeights(
        weights_BT=torch.where(mask_BT, weights_BT, 0.0),
        non_finite_B=non_finite_B,
        from_scores_BT=from_scores_BT,
        at_lower_bound_BT=from_scores_BT & (reshaped_BT <= lowest),
        at_upper_bound_BT=from_scores_BT & (reshaped_BT >= highest),
    )


def _answer_parts(spans: Sequence[AnswerSpan | None], like_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reasoning and content tokens, bool (B, T); none in a row without a span."""
    bounds_B3 = torch.tensor(
        [(s.start, s.content_start, s.content_end) if s is not None else (0, 0, 0) for s in spans],
        dtype=torch.long,
        device=like_BT.device,
    ).reshape(-1, 3)
    start_B1, content_start_B1, content_end_B1 = bounds_B3.unsqueeze(-1).unbind(dim=1)
    index_T = torch.arange(like_BT.shape[1], device=like_BT.device)
    return index_T < start_B1, (index_T >= content_start_B1) & (index_T < content_end_B1)


def _reshape(
    scores_BT: torch.Tensor, statistics_BT: torch.Tensor, options: WeightingOptions
) -> tuple[torch.Tensor, float, float]:
    """Weights from the chosen reshaper, and the bounds that it keeps them in."""
    if options.reshaper == "bilevel":
        weights_BT = bilevel_weights(
            scores_BT,
            statistics_BT,
            quantile=options.quantile,
            boost=options.boost,
            quantile_rule=options.quantile_rule,
        )
        return weights_BT, FLOOR, math.inf
    weights_BT = log_zscore_weights(
        scores_BT.clamp(min=0),  # a drop in likelihood can be negative, and the logarithm needs a score
        statistics_BT,
        weight_mean=options.weight_mean,
        weight_std=options.weight_std,
        weight_min=options.weight_min,
        weight_max=options.weight_max,
    )
    return weights_BT, options.weight_min, options.weight_max


def _restore_mass(weights_BT: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Scale the weights of each row's given tokens so that they sum to the number of these tokens."""
    # In float64, so that the padding on a row's right, which sets the order of the sum, does not show in its weights.
    total_B1 = torch.where(tokens_BT, weights_BT.double(), 0.0).sum(dim=-1, keepdim=True)
    scale_B1 = torch.where(total_B1 > 0, tokens_BT.sum(dim=-1, keepdim=True) / total_B1, 1.0)
    return torch.where(tokens_BT, weights_BT * scale_B1, weights_BT.double()).float()


def apply_token_weights(
    advantages_BT: torch.Tensor, weights_BT: torch.Tensor, response_mask_BT: torch.Tensor
) -> torch.Tensor:
    """Token advantages ``A_t = w_t * A``, 0 outside the response mask whatever stands there.

    All of shape (B, T); the weights are detached. Returns the advantages' dtype.
    """
    weighted_BT = advantages_BT * weights_BT.detach().to(advantages_BT.dtype)
    return torch.where(response_mask_BT.bool(), weighted_BT, 0.0)
