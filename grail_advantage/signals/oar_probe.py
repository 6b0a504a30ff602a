"""The answer as OAR reads it off the model, and how far two readings are apart.

Source: OAR (arXiv 2601.07408). Shared by its two signals, :mod:`grail_advantage.signals.oar_gradient` and
:mod:`grail_advantage.signals.oar_perturbation`. Logits are taken as they are, without a temperature.

Shape suffixes: R rows, K positions that a probe reads (of all rows, one row after the other), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_probe(logits_KV: torch.Tensor, tokens_K: torch.Tensor, counts: Sequence[int], probe: str) -> torch.Tensor:
    """The answer as the model sees it.

    Args:
        logits_KV: logits of the probe's positions, any floating dtype.
        tokens_K: the token after each position, int64; read only by ``answer_joint``.
        counts: how many of the K belong to each row.
        probe: ``answer_mean`` or ``last``: the log-softmax of a row's mean logits, (R, V); ``answer_joint``: its mean
            log-likelihood, (R,). In float64 on the CPU from the mean on, as readings that differ in the seventh digit are
            compared and some devices have no float64.
    """
    logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
    if probe == "answer_joint":
        log_probs_KV = torch.log_softmax(logits_KV, dim=-1)
        log_probs_K = log_probs_KV.gather(-1, tokens_K.unsqueeze(-1)).squeeze(-1).cpu().double()
        return torch.stack([row_K.mean() for row_K in log_probs_K.split(list(counts))])
    mean_RV = torch.stack([row_KV.mean(dim=0) for row_KV in logits_KV.split(list(counts))])
    return torch.log_softmax(mean_RV.cpu().double(), dim=-1)


def divergence(clean_R: torch.Tensor, other_R: torch.Tensor, probe: str) -> torch.Tensor:
    """``KL(P0 || P)`` of two readings, or for ``answer_joint`` the drop ``phi0 - phi``.

    Args:
        clean_R: from :func:`read_probe`, detached; its first dimension may be 1.
        other_R: from :func:`read_probe`.
        probe: what both were read with.

    Returns:
        (R,) float64, on the CPU.
    """
    if probe == "answer_joint":
        return clean_R - other_R
    return (clean_R.exp() * (clean_R - other_R)).sum(dim=-1)
