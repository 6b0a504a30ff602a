"""From token scores to token weights to token advantages.

Pure tensor functions, shared by :func:`grail_advantage.compute_token_weights` and the trainers, so that all give the same
weights. They name no method: a signal says which responses and tokens its scores weigh, and how.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.batch import RolloutBatch
from grail_advantage.model.interface import RowScores
from grail_advantage.signals.base import AnswerWeights, Reshaped, RowSelection, Signal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchWeights:
    """Token weights of a batch, and the masks that its metrics need: bool, shape (B, T)."""

    weights_BT: torch.Tensor
    """float32; 0 outside the response mask. 1 inside for a signal that gives advantages."""
    non_finite_B: torch.Tensor
    """bool (B,); the response had a non-finite score and fell back to weight 1."""
    from_scores_BT: torch.Tensor
    """The weight comes from the token's score, not from an override."""
    at_lower_bound_BT: torch.Tensor
    at_upper_bound_BT: torch.Tensor
    """The weight from the score met that bound of the map."""
    given_BT: torch.Tensor | None = None
    """float32; the token advantages of a signal that gives these."""

    def advantages(self, base_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Token advantages (B, T) in the dtype of the base advantages, 0 outside the mask."""
        if self.given_BT is not None:
            return self.given_BT.to(base_BT.dtype)
        return apply_token_weights(base_BT, self.weights_BT, mask_BT)


def batch_weights(
    scores_BT: torch.Tensor | None, batch: RolloutBatch, rows: RowSelection, signal: Signal
) -> BatchWeights:
    """A batch's token weights: scores through the signal's map, then its own answer weights, then the sum of each response's
    weights. Scores that are not finite are warned of.

    Responses that are not selected have weight 1 on every token, except that ``answer_weights.outside_gate`` extends
    the answer weights to responses outside the gate. A selected response with a non-finite score or weight has weight 1
    on every token.

    Args:
        scores_BT: scores aligned to tokens; read only in selected responses, and there only in the statistics set where
            the signal has no answer weights. ``None`` where no response is selected.
        batch: the batch.
        rows: from ``signal.select(batch)``.
        signal: the method.

    Raises:
        ValueError: a map of the wrong shape or with a negative weight.
    """
    of_batch = _given_advantages if signal.gives == "advantages" else _weights
    result = of_batch(scores_BT, batch, rows, signal)
    if result.non_finite_B.any():
        logger.warning(
            "%s, step %d: %d of %d selected responses have a score that is not finite, and %s",
            signal.section,
            batch.step,
            int(result.non_finite_B.sum()),
            int(rows.selected_B.sum()),
            "have weight 1" if signal.without_scores == "base" else "train nothing",
        )
    return result


def _weights(scores_BT: torch.Tensor | None, batch: RolloutBatch, rows: RowSelection, signal: Signal) -> BatchWeights:
    tokens = _tokens_of(batch, signal)
    if scores_BT is None:
        scores_BT = torch.ones(batch.mask_BT.shape)
    scored_B = rows.selected_B & _finite_rows(scores_BT, tokens.read_BT)
    reshaped = Reshaped(torch.ones_like(batch.mask_BT, dtype=torch.float32))
    if scored_B.any():
        scored_B1 = scored_B.unsqueeze(-1)
        known_BT = torch.where(scored_B1 & tokens.read_BT, scores_BT.float(), 1.0)
        reshaped = signal.reshape(known_BT, scored_B1 & tokens.statistics_BT, batch)
        _check_weights(reshaped, scored_B1 & tokens.by_score_BT, signal)
        scored_B = scored_B & _finite_rows(reshaped.weights_BT, tokens.by_score_BT)

    scored_B1 = scored_B.unsqueeze(-1)
    from_scores_BT = scored_B1 & tokens.by_score_BT
    weights_BT = torch.where(from_scores_BT, reshaped.weights_BT, 1.0)
    sharing_BT = tokens.read_BT  # the tokens of a scored response that share the sum of its weights
    if signal.answer_weights is not None:
        weights_BT = _with_answers(weights_BT, signal.answer_weights, scored_B, rows, tokens)
    elif reshaped.elsewhere != 1.0:
        # A response whose statistics set holds no token that trains has nothing to weigh the others against.
        comparable_B1 = scored_B1 & tokens.statistics_BT.any(dim=-1, keepdim=True)
        weights_BT = torch.where(comparable_B1 & ~tokens.statistics_BT, reshaped.elsewhere, weights_BT)
        sharing_BT = batch.mask_BT
    if signal.normalize_mass:
        weights_BT = _restore_mass(weights_BT, scored_B1 & sharing_BT)

    return BatchWeights(
        weights_BT=torch.where(batch.mask_BT, weights_BT, 0.0),
        non_finite_B=rows.selected_B & ~scored_B,
        from_scores_BT=from_scores_BT,
        at_lower_bound_BT=from_scores_BT & (reshaped.weights_BT <= reshaped.lowest),
        at_upper_bound_BT=from_scores_BT & (reshaped.weights_BT >= reshaped.highest),
    )


def _given_advantages(
    scores_BT: torch.Tensor | None, batch: RolloutBatch, rows: RowSelection, signal: Signal
) -> BatchWeights:
    """The scores themselves in the selected responses, ``signal.without_scores`` where they are not finite; the response's
    advantage in the others."""
    scored_B = torch.zeros_like(rows.selected_B)
    given_BT = batch.advantages_B.float().unsqueeze(1).expand(batch.mask_BT.shape)
    if scores_BT is not None:
        scored_B = rows.selected_B & batch.trains_B & _finite_rows(scores_BT, batch.mask_BT)
        given_BT = torch.where(scored_B.unsqueeze(1), scores_BT.float(), given_BT)
    if signal.without_scores == "nothing":
        given_BT = torch.where((rows.selected_B & ~scored_B).unsqueeze(1), 0.0, given_BT)
    nothing_BT = torch.zeros_like(batch.mask_BT)
    return BatchWeights(
        weights_BT=batch.mask_BT.float(),
        non_finite_B=rows.selected_B & ~scored_B,
        from_scores_BT=scored_B.unsqueeze(1) & batch.mask_BT,
        at_lower_bound_BT=nothing_BT,
        at_upper_bound_BT=nothing_BT,
        given_BT=torch.where(batch.mask_BT, given_BT, 0.0),
    )


@dataclass(frozen=True)
class _Tokens:
    """Which tokens are which, whatever happens to their responses; bool (B, T)."""

    reasoning_BT: torch.Tensor
    """Before the answer."""
    content_BT: torch.Tensor
    """The answer's content."""
    statistics_BT: torch.Tensor
    """The map compares their scores."""
    by_score_BT: torch.Tensor
    """Their weights come from their scores, in scored responses."""
    read_BT: torch.Tensor
    """Their scores must be finite."""


def _tokens_of(batch: RolloutBatch, signal: Signal) -> _Tokens:
    reasoning_BT, content_BT = _answer_parts(batch.spans, batch.mask_BT)
    before_answer_BT = batch.mask_BT & reasoning_BT
    statistics_BT = before_answer_BT if signal.statistics == "reasoning" else batch.mask_BT
    if signal.answer_weights is None:
        return _Tokens(reasoning_BT, content_BT, statistics_BT, by_score_BT=statistics_BT, read_BT=statistics_BT)
    return _Tokens(reasoning_BT, content_BT, statistics_BT, by_score_BT=before_answer_BT, read_BT=batch.mask_BT)


def _finite_rows(values_BT: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """bool (B,); responses whose values of these tokens are all finite."""
    return (torch.isfinite(values_BT) | ~tokens_BT).all(dim=-1)


def _with_answers(
    weights_BT: torch.Tensor, answer: AnswerWeights, scored_B: torch.Tensor, rows: RowSelection, tokens: _Tokens
) -> torch.Tensor:
    """The weights with the method's own from each answer on."""
    outside_gate_B = rows.answered_B & ~rows.inside_gate_B
    overridden_B1 = (scored_B | outside_gate_B if answer.outside_gate else scored_B).unsqueeze(-1)
    weights_BT = torch.where(overridden_B1 & ~tokens.reasoning_BT, answer.others, weights_BT)
    return torch.where(overridden_B1 & tokens.content_BT, answer.content, weights_BT)


def scores_of(
    signal: Signal, batch: RolloutBatch, rows: RowSelection, of_pass_BT: torch.Tensor | None
) -> torch.Tensor | None:
    """A signal's scores (B, T) float32, NaN outside the selected responses' tokens; ``None`` where no response is selected.

    ``of_pass_BT`` are the scores of its pass; ``None`` for a signal that uses nothing of the model.
    """
    if not rows.selected_B.any():
        return None
    scores_BT = signal.scores(batch, of_pass_BT)
    if scores_BT.shape != batch.mask_BT.shape:
        raise ValueError(
            f"{signal.name}: scores() gave shape {tuple(scores_BT.shape)} for a batch of {tuple(batch.mask_BT.shape)}"
        )
    return torch.where(rows.selected_B.unsqueeze(1) & batch.mask_BT, scores_BT.float(), float("nan"))


def put_row(of_pass_BT: torch.Tensor, place: int, length: int, of_row: RowScores, signal: Signal) -> None:
    """Put a pass's scores of a response with ``length`` response tokens in their place, row ``place`` of all scores."""
    count = len(of_row.scores_T)
    if count > length:
        raise ValueError(f"{signal.name}: run() gave {count} scores for a response of {length} tokens")
    of_pass_BT[place, :count] = of_row.scores_T


def _check_weights(reshaped: Reshaped, used_BT: torch.Tensor, signal: Signal) -> None:
    weights_BT = reshaped.weights_BT
    if weights_BT.shape != used_BT.shape:
        raise ValueError(
            f"{signal.name}: reshape() gave shape {tuple(weights_BT.shape)} for a batch of {tuple(used_BT.shape)}"
        )
    if ((weights_BT < 0) & used_BT).any():
        raise ValueError(f"{signal.name}: a weight below 0 would flip the advantage; clip the weights in reshape()")


def _answer_parts(spans: Sequence[AnswerSpan | None], like_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reasoning and content tokens, bool (B, T); none in a response without a span."""
    bounds_B3 = torch.tensor(
        [(s.start, s.content_start, s.content_end) if s is not None else (0, 0, 0) for s in spans],
        dtype=torch.long,
        device=like_BT.device,
    ).reshape(-1, 3)
    start_B1, content_start_B1, content_end_B1 = bounds_B3.unsqueeze(-1).unbind(dim=1)
    index_T = torch.arange(like_BT.shape[1], device=like_BT.device)
    return index_T < start_B1, (index_T >= content_start_B1) & (index_T < content_end_B1)


def _restore_mass(weights_BT: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Scale the weights of each response's given tokens so that they sum to the number of these tokens."""
    # In float64, so that the padding to a response's right, which sets the order of the sum, does not show in its weights.
    total_B1 = torch.where(tokens_BT, weights_BT.double(), 0.0).sum(dim=-1, keepdim=True)
    scale_B1 = torch.where(total_B1 > 0, tokens_BT.sum(dim=-1, keepdim=True) / total_B1, 1.0)
    return torch.where(tokens_BT, weights_BT * scale_B1, weights_BT.double()).float()


def apply_token_weights(
    advantages_BT: torch.Tensor, weights_BT: torch.Tensor, response_mask_BT: torch.Tensor
) -> torch.Tensor:
    """Token advantages ``A_t = w_t * A``, 0 outside the response mask whatever is there.

    All of shape (B, T); the weights are detached. Returns the advantages' dtype.
    """
    weighted_BT = advantages_BT * weights_BT.detach().to(advantages_BT.dtype)
    return torch.where(response_mask_BT.bool(), weighted_BT, 0.0)
