"""OAR-G: how strongly the answer reacts to each token when the embeddings are shaken a little.

Source: OAR (arXiv 2601.07408). With Gaussian noise on the embeddings and ``J`` the divergence of the answer from what it is
without noise (see :mod:`grail_advantage.signals.oar_probe`), a position's score is ``| sum over dims of (dJ/de) * e |``.

Shape suffixes: B rows, S positions, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


def noise_seed(seed: int, step: int, row: int) -> int:
    """Seed of one row's noise: the first eight bytes of the SHA-256 of ``"seed/step/row"``, little-endian.

    It depends on nothing else, so that a row's noise is the same on any rank, in any micro-batch and with any padding.

    Args:
        seed: the run's seed.
        step: training step.
        row: the row's place in the batch.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{row}".encode()).digest()[:8], "little")


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


def noisy_positions(variant: str, response_start: int, reasoning_length: int, response_length: int) -> tuple[int, int]:
    """First position of a row that gets noise, and how many do.

    ``official``: the reasoning tokens' own positions; ``grail_port``: the predictor positions of all response tokens.
    """
    return (response_start - 1, response_length) if variant == "grail_port" else (response_start, reasoning_length)


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


def sensitivity(
    loss: torch.Tensor, noisy_leaf_BSD: torch.Tensor, clean_BSD: torch.Tensor, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward from ``loss`` to the noisy embeddings alone.

    Args:
        loss: the divergence, a scalar; summed over rows, each of which depends on its own embeddings alone.
        noisy_leaf_BSD: the noisy embeddings, a leaf of the graph.
        clean_BSD: the embeddings without noise.
        variant: which of the two the gradient is multiplied with: ``official`` the clean, ``grail_port`` the noisy.

    Returns:
        ``(score_BS, gradient_norm_BS)``, float32.
    """
    (gradient_BSD,) = torch.autograd.grad(loss, noisy_leaf_BSD)
    gradient_BSD = gradient_BSD.float()
    embeddings_BSD = (noisy_leaf_BSD if variant == "grail_port" else clean_BSD).detach().float()
    return (gradient_BSD * embeddings_BSD).sum(dim=-1).abs(), torch.linalg.vector_norm(gradient_BSD, dim=-1)
