"""From token scores to token weights to token advantages.

Pure tensor functions, shared by :func:`grail_advantage.compute_token_weights` and the trainers, so that all give the same
weights. No method is named here: a signal says which rows and tokens its scores weigh, and how.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.batch import RolloutBatch
from grail_advantage.model_interface import RowScores
from grail_advantage.signals.base import Reshaped, RowSelection, Signal


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
    """The weight from the score met that bound of the map."""


def batch_weights(
    scores_BT: torch.Tensor | None, batch: RolloutBatch, rows: RowSelection, signal: Signal
) -> BatchWeights:
    """A batch's token weights: scores through the signal's map, then its own answer weights, then the row's mass.

    Rows that are not selected weigh 1 on every token, except that ``answer_weights.outside_gate`` extends the answer weights to
    rows outside the gate. A selected row with a non-finite score or weight weighs 1 on every token.

    Args:
        scores_BT: scores aligned to tokens; read only in selected rows, and there only in the statistics set where the signal
            has no answer weights. ``None`` where no row is selected.
        batch: the batch.
        rows: from ``signal.select(batch)``.
        signal: the method.

    Raises:
        ValueError: a map of the wrong shape or with a negative weight.
    """
    mask_BT = batch.mask_BT
    reasoning_BT, content_BT = _answer_parts(batch.spans, mask_BT)
    answer = signal.answer_weights
    statistics_BT = mask_BT & reasoning_BT if signal.statistics == "reasoning" else mask_BT
    read_BT = statistics_BT if answer is None else mask_BT
    if scores_BT is None:
        scores_BT = torch.ones(mask_BT.shape, device=mask_BT.device)

    non_finite_B = rows.selected_B & (~torch.isfinite(scores_BT) & read_BT).any(dim=-1)
    scored_B1 = (rows.selected_B & ~non_finite_B).unsqueeze(-1)
    from_scores_BT = scored_B1 & (statistics_BT if answer is None else mask_BT & reasoning_BT)

    reshaped = Reshaped(torch.ones_like(mask_BT, dtype=torch.float32))
    if scored_B1.any():
        known_BT = torch.where(scored_B1 & read_BT, scores_BT.float(), 1.0)
        reshaped = signal.reshape(known_BT, statistics_BT & scored_B1, batch)
        _check_weights(reshaped, from_scores_BT, signal)
        spoilt_B = (~torch.isfinite(reshaped.weights_BT) & from_scores_BT).any(dim=-1)
        non_finite_B = non_finite_B | spoilt_B
        scored_B1, from_scores_BT = scored_B1 & ~spoilt_B.unsqueeze(-1), from_scores_BT & ~spoilt_B.unsqueeze(-1)
    weights_BT = torch.where(from_scores_BT, reshaped.weights_BT, 1.0)
    weighed_BT = read_BT  # the tokens that share a row's mass
    if answer is not None:
        overridden_B = scored_B1.squeeze(-1)
        if answer.outside_gate:
            overridden_B = overridden_B | (rows.answered_B & ~rows.inside_gate_B)
        overridden_B1 = overridden_B.unsqueeze(-1)
        weights_BT = torch.where(overridden_B1 & ~reasoning_BT, answer.others, weights_BT)
        weights_BT = torch.where(overridden_B1 & content_BT, answer.content, weights_BT)
    elif reshaped.elsewhere != 1.0:
        # A row whose statistics set holds no token that trains has nothing to weigh the others against.
        weighed_B1 = scored_B1 & statistics_BT.any(dim=-1, keepdim=True)
        weights_BT = torch.where(weighed_B1 & ~statistics_BT, reshaped.elsewhere, weights_BT)
        weighed_BT = mask_BT
    if signal.normalize_mass:
        weights_BT = _restore_mass(weights_BT, scored_B1 & weighed_BT)

    return BatchWeights(
        weights_BT=torch.where(mask_BT, weights_BT, 0.0),
        non_finite_B=non_finite_B,
        from_scores_BT=from_scores_BT,
        at_lower_bound_BT=from_scores_BT & (reshaped.weights_BT <= reshaped.lowest),
        at_upper_bound_BT=from_scores_BT & (reshaped.weights_BT >= reshaped.highest),
    )


def scores_of(
    signal: Signal, batch: RolloutBatch, rows: RowSelection, of_pass_BT: torch.Tensor | None
) -> torch.Tensor | None:
    """A signal's scores (B, T) float32, NaN outside the selected rows' tokens; ``None`` where no row is selected.

    Args:
        signal: the method.
        batch: with the columns that it reads.
        rows: from ``signal.select``.
        of_pass_BT: scores of its pass; ``None`` for a signal that uses nothing of the model.
    """
    if not rows.selected_B.any():
        return None
    scores_BT = signal.scores(batch, of_pass_BT)
    if scores_BT.shape != batch.mask_BT.shape:
        raise ValueError(
            f"{signal.name}: scores() gave shape {tuple(scores_BT.shape)} for a batch of {tuple(batch.mask_BT.shape)}"
        )
    return torch.where(rows.selected_B.unsqueeze(1) & batch.mask_BT, scores_BT.float(), float("nan"))


def put_row(of_pass_BT: torch.Tensor, place: int, length: int, found: RowScores, signal: Signal) -> None:
    """Put a pass's scores of one row in their place.

    Args:
        of_pass_BT: all scores.
        place: the row.
        length: number of its response tokens.
        found: what the pass gave.
        signal: the method, for the message.
    """
    count = len(found.scores_T)
    if count > length:
        raise ValueError(f"{signal.name}: run() gave {count} scores for a response of {length} tokens")
    of_pass_BT[place, :count] = found.scores_T


def _check_weights(reshaped: Reshaped, used_BT: torch.Tensor, signal: Signal) -> None:
    weights_BT = reshaped.weights_BT
    if weights_BT.shape != used_BT.shape:
        raise ValueError(
            f"{signal.name}: reshape() gave shape {tuple(weights_BT.shape)} for a batch of {tuple(used_BT.shape)}"
        )
    if ((weights_BT < 0) & used_BT).any():
        raise ValueError(f"{signal.name}: a weight below 0 would flip the advantage; clip the weights in reshape()")


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
