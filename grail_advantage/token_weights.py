"""Token weights for any Hugging Face causal language model, one row at a time.

This is the plain form of the methods: no packing, no sharding, one row a forward, or for OAR-P one row's counterfactuals. The
verl extension does the same in packed, sharded micro-batches and is tested against this module.

Source: GRAIL (arXiv 2606.04889) and OAR (arXiv 2601.07408).

Shape suffixes: B rows, L prompt + response, T response tokens, S positions, P positions from the one before the response on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.answer_span import AnswerSpan, find_answer_spans
from grail_advantage.config import GrailConfig, OarConfig
from grail_advantage.metrics import weight_metrics
from grail_advantage.signals.grad_activation import (
    accepts_logits_to_keep,
    capture_leaf,
    evaluation_mode,
    leaf_module,
    negative_log_likelihood,
    saliency,
)
from grail_advantage.signals.oar_gradient import (
    NoisyStretch,
    noise_seed,
    noisy_embeddings,
    noisy_positions,
    sensitivity,
)
from grail_advantage.signals.oar_perturbation import PerturbationRow, perturbation_scores, replaced_tokens
from grail_advantage.signals.oar_probe import divergence, probe_positions, read_probe
from grail_advantage.weighting import align_scores, batch_weights, select_rows, target_range

PERTURBATION_TOKENS = 16384
"""OAR-P: most tokens of the counterfactuals that go through the model together."""


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
    config: GrailConfig | OarConfig,
    *,
    temperature: float = 1.0,
) -> TokenWeights:
    """Token weights of GRAIL, OAR-G or OAR-P for a batch of rollouts.

    Each row is stripped of its padding and computed alone, so its weights do not depend on its neighbours or on the side of
    the padding; OAR-G's noise depends on the row's place in the batch. Rows with advantage 0 weigh 1: their token advantages
    are 0 in any case. No parameter gradient, no hook and no changed training mode stay behind, also when it raises.

    Args:
        model: a causal language model.
        tokenizer: the tokenizer that the token ids belong to.
        input_ids: (B, L) int64, prompt + response, padded on either side.
        attention_mask: (B, L) bool or 0/1.
        response_mask: (B, L) bool or 0/1, the response tokens, contiguous in each row; a row without any weighs 0.
        advantages: (B,) one advantage a row.
        config: the method and its options.
        temperature: sampling temperature that GRAIL divides the logits by; OAR takes them as they are.

    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive, a response that starts the row or has gaps, a
            tokenizer without the padding token that OAR-P needs.
    """
    _check_inputs(input_ids, attention_mask, response_mask, advantages, temperature)
    device = input_ids.device
    valid_BL, response_BL = attention_mask.bool(), response_mask.bool()
    responses = [input_ids[row, response_BL[row]] for row in range(input_ids.shape[0])]
    spans = find_answer_spans(responses, tokenizer, config.span)
    rows = select_rows(advantages, spans, config)

    width = max((response.shape[0] for response in responses), default=0)
    mask_BT = torch.arange(width, device=device) < response_BL.sum(dim=-1, keepdim=True)
    with torch.inference_mode(False):  # the caller may be in it, and such a tensor could not be written to below
        scores_BT = torch.full(mask_BT.shape, float("nan"), device=device)
    gradient_norms = [torch.zeros(0)]
    signal = _signal(model, tokenizer, config, temperature)
    if rows.selected_B.any():
        with evaluation_mode(model):
            selected = [
                _Row(
                    index,
                    input_ids[index, valid_BL[index]],
                    int(response_BL[index, valid_BL[index]].nonzero()[0]),
                    spans[index],
                )
                for index in rows.selected_B.nonzero().flatten().tolist()
            ]
            for row, (scores, norms) in zip(selected, signal(selected), strict=True):
                scores_BT[row.index, : len(scores)] = scores
                gradient_norms.append(norms.cpu())

    result = batch_weights(scores_BT, mask_BT, spans, rows, config)
    return TokenWeights(
        weights=_to_full_width(result.weights_BT, mask_BT, response_BL, 0.0),
        scores=_to_full_width(scores_BT, mask_BT, response_BL, float("nan")),
        spans=spans,
        stats=weight_metrics(result, mask_BT, advantages, rows, torch.cat(gradient_norms)),
    )


@dataclass(frozen=True)
class _Row:
    """A row that needs scores, without its padding."""

    index: int
    """Its place in the batch."""
    tokens_S: torch.Tensor
    response_start: int
    span: AnswerSpan

    @property
    def response_length(self) -> int:
        return len(self.tokens_S) - self.response_start


_Scores = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""For each row the scores of its response tokens, from the first on as far as the method has any, and gradient norms."""


def _signal(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GrailConfig | OarConfig, temperature: float
) -> Callable[[list[_Row]], _Scores]:
    if isinstance(config, GrailConfig):
        return lambda rows: (_grail_scores(model, row, config, temperature) for row in rows)
    if config.method == "gradient":
        return lambda rows: (_oar_gradient_scores(model, row, config) for row in rows)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "oar.method='perturbation' replaces tokens by the padding token, which the tokenizer lacks; "
            "set tokenizer.pad_token"
        )
    return lambda rows: _oar_perturbation_scores(model, rows, config, tokenizer.pad_token_id)


def _logits(
    model: PreTrainedModel, tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None = None, **options: bool
) -> tuple[torch.Tensor, Cache | None]:
    """Logits (N, K, V) at the columns ``kept_K``, and the cache of the forward; ``cache`` holds what comes before."""
    behind = cache.get_seq_length() if cache is not None else 0
    attention_mask = tokens_NS.new_ones(tokens_NS.shape[0], behind + tokens_NS.shape[1])
    keep = {"logits_to_keep": kept_K} if accepts_logits_to_keep(model) else {}
    past = {"past_key_values": cache} if cache is not None else {}
    output = model(input_ids=tokens_NS, attention_mask=attention_mask, **past, **keep, **options)
    return output.logits if keep else output.logits[:, kept_K], output.get("past_key_values")


def _grail_scores(
    model: PreTrainedModel, row: _Row, config: GrailConfig, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRAIL's saliency.

    Nothing behind the last target token's predictor position can influence the answer, so the forward ends there; and only
    the target's predictor positions need logits.
    """
    first, past = (row.response_start + bound for bound in target_range(row.span, config.target))
    predictors_K = torch.arange(first - 1, past - 1, device=row.tokens_S.device)
    with capture_leaf(leaf_module(model, config.leaf)) as leaves:
        logits_1KV, _ = _logits(model, row.tokens_S[None, : past - 1], predictors_K, use_cache=False)
    loss = negative_log_likelihood(logits_1KV[0], row.tokens_S[first:past], temperature)
    saliency_1S, norm_1S = saliency(loss, leaves[0])
    scores_T = align_scores(saliency_1S[0, row.response_start - 1 :], row.response_length, config.alignment)
    return scores_T, norm_1S[0, row.response_start - 1 :]


def _oar_gradient_scores(model: PreTrainedModel, row: _Row, config: OarConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """OAR-G's sensitivity, the forward cut behind the probe's last position."""
    start, stop = probe_positions(row.span, row.response_start, len(row.tokens_S), config.probe)
    tokens_1S = row.tokens_S[None, :stop]
    kept_K = torch.arange(start, stop, device=tokens_1S.device)
    tokens_K = row.tokens_S.roll(-1)[start:stop]
    first, length = noisy_positions(config.variant, row.response_start, row.span.start, row.response_length)
    seed = noise_seed(config.noise_seed, 0, row.index)
    stretch = NoisyStretch(0, first, length, min(length, stop - first), seed)

    with torch.no_grad():
        logits_1KV, _ = _logits(model, tokens_1S, kept_K, use_cache=False)
        clean = read_probe(logits_1KV[0], tokens_K, [len(kept_K)], config.probe)
    embedding = model.get_input_embeddings()
    with noisy_embeddings(embedding, [stretch], config.noise_std) as clean_BSD, capture_leaf(embedding) as leaves:
        logits_1KV, _ = _logits(model, tokens_1S, kept_K, use_cache=False)
    noisy_reading = read_probe(logits_1KV[0], tokens_K, [len(kept_K)], config.probe)
    loss = divergence(clean, noisy_reading, config.probe).sum()
    score_1S, norm_1S = sensitivity(loss, leaves[0], clean_BSD[0], config.variant)
    scores_T = align_scores(score_1S[0, row.response_start - 1 :], row.response_length, config.alignment)
    scored = row.span.start if config.statistics == "reasoning" else row.response_length
    return scores_T[:scored], norm_1S[0, row.response_start - 1 :]


def _oar_perturbation_scores(model: PreTrainedModel, rows: list[_Row], config: OarConfig, pad_token: int) -> _Scores:
    """OAR-P's divergences, as many counterfactuals at a time as the token budget holds, with a progress bar on a terminal."""
    model.eval()  # no checkpointing either: there is no backward, and checkpointed blocks keep no keys and values
    total = sum(len(replaced_tokens(row.span.start, config.max_perturbations)) for row in rows)
    with tqdm(total=total, desc="OAR-P", unit="counterfactual", disable=None, leave=False) as bar:
        for row in rows:
            start, stop = probe_positions(row.span, row.response_start, len(row.tokens_S), config.probe)
            scores = perturbation_scores(
                lambda tokens_NS, kept_K, cache: _logits(model, tokens_NS, kept_K, cache, use_cache=True),
                PerturbationRow(row.tokens_S, row.response_start, row.span.start, start, stop),
                probe=config.probe,
                pad_token=pad_token,
                counterfactuals=max(1, PERTURBATION_TOKENS // stop),
                max_perturbations=config.max_perturbations,
                progress=bar.update,
            )
            yield scores, torch.zeros(0)


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
