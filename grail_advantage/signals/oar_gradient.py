"""OAR-G: how strongly the answer reacts to each token when the embeddings are shaken a little. See :mod:`.oar`.

Source: OAR (arXiv 2601.07408). With Gaussian noise on the embeddings and ``J`` the divergence of the answer from what it is
without noise (see :mod:`grail_advantage.signals.oar_probe`), a position's score is ``| sum over dims of (dJ/de) * e |``.

Shape suffixes: B rows, S positions, D hidden, K positions that the probes read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from grail_advantage.model.activations import capture_leaf
from grail_advantage.model.interface import MicroBatch, Range, RowScores
from grail_advantage.signals.oar_probe import divergence, read_probe
from grail_advantage.signals.saliency import align_scores


def noise_seed(seed: int, step: int, tokens: Sequence[int]) -> int:
    """Seed of one row's noise: the first eight bytes of the SHA-256 of ``"seed/step/token,token,..."``, little-endian.

    It depends on nothing else, so that a row's noise is the same on any rank, in any micro-batch, in any order of the rows and
    with any padding. Rows that say the same share it, as they share everything else that their scores depend on.

    Args:
        seed: the run's seed.
        step: training step.
        tokens: the ids of the row's prompt and of its response up to the end of the answer.
    """
    content = ",".join(map(str, tokens))
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{content}".encode()).digest()[:8], "little")


@dataclass(frozen=True)
class NoisyStretch:
    """Consecutive positions of a row of the batch that get noise."""

    batch_row: int
    start: int
    length: int
    """Number of positions that noise is drawn for."""
    kept: int
    """How many of these the batch holds; a row may be cut where nothing matters any more."""
    seed: int
    """From :func:`noise_seed`."""


@contextmanager
def noisy_embeddings(
    embedding: nn.Module, stretches: Sequence[NoisyStretch], noise_std: float
) -> Iterator[list[torch.Tensor]]:
    """While open, each forward of the embedding layer puts out its output with noise, and appends the clean one to the list.

    Noise is drawn in float32 by a generator on the activations' device: reproducible there, but not the same on another kind
    of device. The forward hook is gone afterwards, whatever happened inside.
    """
    clean_BSD: list[torch.Tensor] = []

    def add_noise(_module: nn.Module, _args: tuple, output_BSD: torch.Tensor) -> torch.Tensor:
        clean_BSD.append(output_BSD.detach())
        noisy_BSD = output_BSD.detach().clone()
        for stretch in stretches:
            piece_SD = noisy_BSD[stretch.batch_row, stretch.start : stretch.start + stretch.kept]
            device = noisy_BSD.device
            noise_SD = torch.randn(
                (stretch.length, noisy_BSD.shape[-1]),
                generator=torch.Generator(device).manual_seed(stretch.seed),
                device=device,
                dtype=torch.float32,
            )
            # The sum is taken in float32 where the model is narrower.
            piece_SD.copy_(piece_SD + noise_std * noise_SD[: stretch.kept])
        return noisy_BSD

    handle = embedding.register_forward_hook(add_noise)
    try:
        yield clean_BSD
    finally:
        handle.remove()


def gradient_scores(
    micro: MicroBatch,
    probes: Sequence[Range],
    *,
    noise_std: float,
    seed_of: Callable[[Sequence[int]], int],
    probe: str,
    variant: str,
    statistics: str,
    alignment: str,
) -> list[RowScores]:
    """A forward without noise, a forward with it, and a backward to the noisy embeddings.

    Args:
        micro: the rows.
        probes: for each row the positions that the probe reads.
        noise_std: standard deviation of the noise.
        seed_of: seed of a row's noise from the tokens that it depends on, see :func:`noise_seed`.
        probe: see :class:`grail_advantage.OarConfig`, as the rest.
    """
    rows = list(zip(micro.rows, probes, strict=True))
    counts = [stop - start for start, stop in probes]
    tokens_K = torch.cat([row.tokens_S.roll(-1)[start:stop] for row, (start, stop) in rows])
    stretches = []
    for index, (row, (_, stop)) in enumerate(rows):
        # The reasoning tokens' own positions, or the predictor positions of all response tokens.
        first, length = row.response_start, row.answer.start
        if variant == "grail_port":
            first, length = row.response_start - 1, row.response_length
        kept = max(0, min(length, stop - first))
        read = row.tokens_S[: row.response_start + row.answer.end].tolist()
        stretches.append(NoisyStretch(*micro.at(index, first), length, kept, seed_of(read)))

    with torch.no_grad():
        clean = read_probe(micro.logits(probes), tokens_K, counts, probe)
    with (
        noisy_embeddings(micro.embedding, stretches, noise_std) as clean_BSD,
        capture_leaf(micro.embedding) as leaves,
    ):
        noisy_logits_KV = micro.logits(probes)
    noisy = read_probe(noisy_logits_KV, tokens_K, counts, probe)
    # Summed over rows, each of which depends on its own embeddings alone.
    (gradient_BSD,) = torch.autograd.grad(divergence(clean, noisy, probe).sum(), leaves[0])
    gradient_BSD = gradient_BSD.float()
    embeddings_BSD = (leaves[0] if variant == "grail_port" else clean_BSD[0]).detach().float()
    score_BS = (gradient_BSD * embeddings_BSD).sum(dim=-1).abs()
    norm_BS = torch.linalg.vector_norm(gradient_BSD, dim=-1)

    scores = []
    for (row, _), score_S, norm_S in zip(rows, micro.per_row(score_BS), micro.per_row(norm_BS), strict=True):
        first = row.response_start - 1
        scored = row.answer.start if statistics == "reasoning" else row.response_length
        scores.append(RowScores(align_scores(score_S[first:], scored, alignment), norm_S[first:]))
    return scores
