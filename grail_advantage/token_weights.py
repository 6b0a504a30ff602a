"""Token weights for any Hugging Face causal language model, one row at a time.

This is the plain form of the method: no packing, no sharding, one forward and one backward a selected row. The verl
extension does the same in packed, sharded micro-batches and is tested against this module.

Source: GRAIL (arXiv 2606.04889).

Shape suffixes: B rows, L prompt + response, T response tokens, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.answer_span import AnswerSpan, find_answer_spans
from grail_advantage.config import GrailConfig
from grail_advantage.metrics import weight_metrics
from grail_advantage.signals.grad_activation import (
    accepts_logits_to_keep,
    capture_leaf,
    evaluation_mode,
    leaf_module,
    negative_log_likelihood,
    saliency,
)
from grail_advantage.weighting import align_scores, grail_weights, select_rows, target_range


@dataclass(frozen=True)
class TokenWeights:
    """Result of :func:`compute_token_weights`."""

    weights: torch.Tensor
    """(B, L) float32; 0 outside the response."""
    scores: torch.Tensor
    """(B, L) float32, aligned to tokens; NaN where none was computed."""
    spans: list[AnswerSpan | None]
    """Answer spans, relative to each response's first token."""
    stats: dict[str, float]
    """Figures of the batch, see :func:`grail_advantage.metrics.weight_metrics`."""


def compute_token_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    config: GrailConfig,
    *,
    temperature: float = 1.0,
) -> TokenWeights:
    """GRAIL's token weights for a batch of rollouts.

    Each row is stripped of its padding and computed alone, so its weights do not depend on its neighbours or on the side of
    the padding. Rows with advantage 0 weigh 1: their token advantages are 0 in any case. No parameter gradient, no hook and no
    changed training mode stay behind, also when it raises.

    Args:
        model: a causal language model.
        tokenizer: the tokenizer that the token ids belong to.
        input_ids: (B, L) int64, prompt + response, padded on either side.
        attention_mask: (B, L) bool or 0/1.
        response_mask: (B, L) bool or 0/1, the response tokens, contiguous in each row; a row without any weighs 0.
        advantages: (B,) one advantage a row.
        config: the options.
        temperature: sampling temperature that the logits are divided by.

    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive, a response that starts the row or has gaps.
    """
    _check_inputs(input_ids, attention_mask, response_mask, advantages, temperature)
    device = input_ids.device
    valid_BL, response_BL = attention_mask.bool(), response_mask.bool()
    responses = [input_ids[row, response_BL[row]] for row in range(input_ids.shape[0])]
    spans = find_answer_spans(responses, tokenizer, config.span)
    rows = select_rows(advantages, spans, config.gate)

    width = max((response.shape[0] for response in responses), default=0)
    mask_BT = torch.arange(width, device=device) < response_BL.sum(dim=-1, keepdim=True)
    with torch.inference_mode(False):  # the caller may be in it, and such a tensor could not be written to below
        scores_BT = torch.full(mask_BT.shape, float("nan"), device=device)
    gradient_norms = [torch.zeros(0)]
    if rows.selected_B.any():
        with evaluation_mode(model):
            for row in rows.selected_B.nonzero().flatten().tolist():
                tokens_S = input_ids[row, valid_BL[row]]
                response_length = responses[row].shape[0]
                response_start = int(response_BL[row, valid_BL[row]].nonzero()[0])
                start, end = target_range(spans[row], config.target)
                saliency_P, norm_P = _row_saliency(
                    model,
                    tokens_S,
                    response_start,
                    slice(response_start + start, response_start + end),
                    leaf=config.leaf,
                    temperature=temperature,
                )
                scores_BT[row, :response_length] = align_scores(saliency_P, response_length, config.alignment)
                gradient_norms.append(norm_P.cpu())

    result = grail_weights(scores_BT, mask_BT, spans, rows, config)
    return TokenWeights(
        weights=_to_full_width(result.weights_BT, mask_BT, response_BL, 0.0),
        scores=_to_full_width(scores_BT, mask_BT, response_BL, float("nan")),
        spans=spans,
        stats=weight_metrics(result, mask_BT, advantages, rows, torch.cat(gradient_norms)),
    )


def _row_saliency(
    model: PreTrainedModel,
    tokens_S: torch.Tensor,
    response_start: int,
    target: slice,
    *,
    leaf: str,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Saliency and gradient norm of one unpadded row, from the first response token's predictor position on.

    Nothing behind the last target token's predictor position can influence the answer, so the forward ends there; and only
    the target's predictor positions need logits.
    """
    tokens_1S = tokens_S[: target.stop - 1].unsqueeze(0)
    predictors_K = torch.arange(target.start - 1, target.stop - 1, device=tokens_S.device)
    keep = {"logits_to_keep": predictors_K} if accepts_logits_to_keep(model) else {}
    with capture_leaf(leaf_module(model, leaf)) as leaves:
        logits_1SV = model(
            input_ids=tokens_1S, attention_mask=torch.ones_like(tokens_1S), use_cache=False, **keep
        ).logits
    logits_KV = logits_1SV[0] if keep else logits_1SV[0, predictors_K]
    loss = negative_log_likelihood(logits_KV, tokens_S[target], temperature)
    saliency_1S, norm_1S = saliency(loss, leaves[0])
    return saliency_1S[0, response_start - 1 :], norm_1S[0, response_start - 1 :]


def _to_full_width(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, response_BL: torch.Tensor, fill: float
) -> torch.Tensor:
    values_BL = torch.full(response_BL.shape, fill, dtype=torch.float32, device=values_BT.device)
    values_BL[response_BL] = values_BT[mask_BT]
    return values_BL


def _check_inputs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    temperature: float,
) -> None:
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be (B, L), got shape {tuple(input_ids.shape)}")
    for name, tensor in (("attention_mask", attention_mask), ("response_mask", response_mask)):
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, input_ids {tuple(input_ids.shape)}; they must agree"
            )
    if advantages.shape != input_ids.shape[:1]:
        raise ValueError(
            f"advantages must be one number a row, shape ({input_ids.shape[0]},); got {tuple(advantages.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0; pass the temperature of the sampling")
    response_BL = response_mask.bool()
    if (response_BL & ~attention_mask.bool()).any():
        raise ValueError("response_mask marks a padding token; it must lie inside attention_mask")
    for row in range(input_ids.shape[0]):
        inside = response_BL[row, attention_mask[row].bool()].nonzero().flatten()
        if inside.numel() and inside[-1] - inside[0] + 1 != inside.numel():
            raise ValueError(f"response_mask of row {row} has gaps; the response must be contiguous")
        if inside.numel() and inside[0] == 0:
            raise ValueError(f"row {row} has no prompt token before its response; add at least one")
