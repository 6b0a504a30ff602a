"""OAR-P: how far the answer moves when one token of the reasoning is replaced by padding. See :mod:`.oar`.

Source: OAR (arXiv 2601.07408). One counterfactual a reasoning token, the replacement still attended to; its score is the
divergence of the answer (see :mod:`grail_advantage.signals.oar_probe`).

Counterfactuals go through the model in batches. Those of a batch have everything before their first replaced token in common,
so its keys and values are taken from the clean pass over the row; that is exact in a causal model.

Shape suffixes: S positions, R reasoning tokens, M replaced tokens, N counterfactuals of a batch, K probe positions,
V vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from grail_advantage.batch import PassRow
from grail_advantage.model.interface import Forward, Model, Range
from grail_advantage.signals.oar_probe import divergence, read_probe

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import Cache


def replaced_tokens(reasoning_length: int, max_perturbations: int | None) -> torch.Tensor:
    """Reasoning tokens that get a counterfactual: all, or ``max_perturbations`` evenly spaced ones; int64, ascending."""
    if max_perturbations is None or max_perturbations >= reasoning_length:
        return torch.arange(reasoning_length)
    return torch.linspace(0, reasoning_length - 1, max_perturbations, dtype=torch.float64).round().long()


def interpolate(scores_M: torch.Tensor, replaced_M: torch.Tensor, reasoning_length: int) -> torch.Tensor:
    """Scores of all reasoning tokens, (R,), linear between the replaced ones and level beyond the outermost."""
    index_R = torch.arange(reasoning_length, device=scores_M.device)
    right_R = torch.searchsorted(replaced_M, index_R).clamp(max=len(replaced_M) - 1)
    left_R = torch.where(replaced_M[right_R] > index_R, right_R - 1, right_R).clamp(min=0)
    gap_R = (replaced_M[right_R] - replaced_M[left_R]).clamp(min=1)
    share_R = ((index_R - replaced_M[left_R]) / gap_R).clamp(0, 1)
    return torch.lerp(scores_M[left_R], scores_M[right_R], share_R.to(scores_M.dtype))


@torch.no_grad()
def perturbation_scores(
    row: PassRow, model: Model, forward: Forward, bar: tqdm, *, span: Range, probe: str, replaced_M: torch.Tensor
) -> torch.Tensor:
    """Scores of a row's reasoning tokens.

    Args:
        row: the row, whose response begins with at least one reasoning token.
        model: the host of ``forward``.
        forward: of :meth:`grail_advantage.model.interface.Model.sequences`.
        bar: counts counterfactuals.
        span: positions that the reading is of.
        probe: how they are read, see :func:`grail_advantage.signals.oar_probe.read_probe`.
        replaced_M: from :func:`replaced_tokens`.

    Returns:
        (R,) float32. With ``answer_joint`` a score is negative where the replacement makes the answer more probable.
    """
    tokens_S, (start, length) = row.tokens_S, span
    # answer_joint asks for the token after each position; after the row's last one, which only "last" reads, is none.
    next_S = tokens_S.roll(-1)
    tokens_K = next_S[start:length]
    kept_K = torch.arange(start, length, device=tokens_S.device)
    logits_1KV, cache = forward(tokens_S[None, :length], kept_K, None)
    clean = read_probe(logits_1KV[0], tokens_K, [len(kept_K)], probe)
    cache = cache if _can_be_shared(cache) else None

    scores: list[torch.Tensor] = []
    for replaced_N in replaced_M.split(model.sequences_together(length)):
        count = len(replaced_N)
        # The probe's positions come after every replaced token or are the last one's own, so none is cut off here.
        shared = row.response_start + int(replaced_N[0]) if cache is not None else 0
        tokens_NS = tokens_S[shared:length].repeat(count, 1)
        tokens_NS[torch.arange(count), row.response_start + replaced_N - shared] = model.pad_token
        prefix = shared_prefix(cache, shared, count) if cache is not None else None
        logits_NKV, _ = forward(tokens_NS, kept_K - shared, prefix)
        other_N = read_probe(logits_NKV.flatten(0, 1), tokens_K.repeat(count), [len(kept_K)] * count, probe)
        scores.append(divergence(clean, other_N, probe).float())
        bar.update(count)
    return interpolate(torch.cat(scores), replaced_M, row.answer.start)


def _can_be_shared(cache: Cache | None) -> bool:
    """Only plain attention keeps the keys and values of every position; a sliding window or a state does not, and a cache of
    a model's own may hold a state beside its layers."""
    # Not above, see grail_advantage.model.activations.inner_model.
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if cache is None or type(cache) is not DynamicCache:
        return False
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def shared_prefix(cache: Cache, length: int, rows: int) -> Cache:
    """A cache that holds the first ``length`` positions of a one-row cache for ``rows`` rows; the given one stays as it is."""
    prefix = copy.copy(cache)
    prefix.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in prefix.layers:
        layer.keys = layer.keys[..., :length, :].expand(rows, -1, -1, -1)
        layer.values = layer.values[..., :length, :].expand(rows, -1, -1, -1)
    return prefix
