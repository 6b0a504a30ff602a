"""OAR-G: how strongly the answer reacts to each token when the embeddings are shaken a little. See :mod:`.oar`.

Source: OAR (arXiv 2601.07408). With Gaussian noise on the embeddings and ``J`` the divergence of the answer from what it is
without noise (see :mod:`grail_advantage.signals.oar_probe`), a position's score is ``| sum over dims of (dJ/de) * e |``.

Shape suffixes: B responses, S positions, D hidden, K positions that the probes read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from grail_advantage.model.activations import capture_leaf, gradient_at
from grail_advantage.model.interface import MicroBatch, Range, RowScores
from grail_advantage.signals.oar_probe import divergence, read_probe
from grail_advantage.signals.saliency import align_scores

if TYPE_CHECKING:
    from collections.abc import Sequence


def noise_seed(seed: int, step: int, tokens: Sequence[int]) -> int:
    """Seed of one response's noise: the first eight bytes of the SHA-256 of ``"seed/step/token,token,..."``, little-endian.

    It depends on nothing else, so that a response's noise is the same on any rank, in any micro-batch, in any order and
    with any padding. Rows that say the same share it, as they share everything else that their scores depend on.

    Args:
        seed: the run's seed.
        step: training step.
        tokens: the ids of the row's prompt and of its response up to the end of the answer.
    """
    content = ",".join(map(str, tokens))
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{content}".encode()).digest()[:8], "little")


def gradient_scores(
    micro: MicroBatch, probes: Sequence[Range], *, probe: str, noise_std: float, seed: int, step: int, port: bool
) -> list[RowScores]:
    """A forward without noise, a forward with it, and a backward to the noisy embeddings.

    Noise is drawn in float32 by a generator on the activations' device: reproducible there, but not the same on another kind
    of device. No hook is left, whatever happens.

    Args:
        micro: the rows.
        probes: positions that each row's reading is of.
        probe: how they are read, see :func:`grail_advantage.signals.oar_probe.read_probe`.
        noise_std: of the noise.
        seed: the run's, of the noise.
        step: training step.
        port: the whole response is scored, at the position before each token, by the noisy embedding; else the reasoning.
    """
    counts = [stop - start for start, stop in probes]
    rows = list(zip(micro.rows, probes, strict=True))
    tokens_K = torch.cat([row.tokens_S.roll(-1)[start:stop] for row, (start, stop) in rows])
    clean_BSD: list[torch.Tensor] = []

    def add_noise(_module: nn.Module, _args: tuple, output_BSD: torch.Tensor) -> torch.Tensor:
        clean_BSD.append(output_BSD.detach())
        noisy_BSD = output_BSD.detach().clone()
        device = noisy_BSD.device
        for index, (row, (_, stop)) in enumerate(rows):
            # The reasoning tokens' own positions, or the predictor positions of all response tokens.
            first, length = row.response_start, row.answer.start
            if port:
                first, length = row.response_start - 1, row.response_length
            kept = max(0, min(length, stop - first))  # a row may be cut where nothing matters any more
            read = row.tokens_S[: row.response_start + row.answer.end].tolist()
            noise_SD = torch.randn(
                (length, noisy_BSD.shape[-1]),
                generator=torch.Generator(device).manual_seed(noise_seed(seed, step, read)),
                device=device,
                dtype=torch.float32,
            )
            batch_row, start = micro.at(index, first)
            piece_SD = noisy_BSD[batch_row, start : start + kept]
            # The sum is taken in float32 where the model is narrower.
            piece_SD.copy_(piece_SD + noise_std * noise_SD[:kept])
        return noisy_BSD

    with torch.no_grad():
        clean = read_probe(micro.logits(probes), tokens_K, counts, probe)
    embedding = micro.leaf("embeddings")
    handle = embedding.register_forward_hook(add_noise)
    try:
        with capture_leaf(embedding) as leaves:
            noisy_logits_KV = micro.logits(probes)
    finally:
        handle.remove()
    noisy = read_probe(noisy_logits_KV, tokens_K, counts, probe)
    # Summed over rows, each of which depends on its own embeddings alone.
    gradient_BSD = gradient_at(divergence(clean, noisy, probe).sum(), leaves[0])
    embeddings_BSD = (leaves[0] if port else clean_BSD[0]).detach().float()
    score_BS = (gradient_BSD * embeddings_BSD).sum(dim=-1).abs()
    norm_BS = torch.linalg.vector_norm(gradient_BSD, dim=-1)

    alignment = "predictor" if port else "token"
    scores = []
    for (row, _), score_S, norm_S in zip(rows, micro.per_row(score_BS), micro.per_row(norm_BS), strict=True):
        first = row.response_start - 1
        scored = row.response_length if port else row.answer.start
        scores.append(RowScores(align_scores(score_S[first:], scored, alignment), norm_S[first:]))
    return scores
