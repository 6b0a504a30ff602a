"""The measurement: the gradient of the loss with respect to each token's log-probability, read by a hook.

It costs one (b, T) tensor a micro-batch, no backward more, and changes nothing.

Shape suffixes: b responses of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A micro-batch of an optimiser step, on one rank."""

    rows_b: torch.Tensor
    """(b,) int64: which responses of the rollout batch it holds, by their places there."""
    log_probs_bT: torch.Tensor
    """As they went into the loss, detached. T as in :class:`Batch`: narrower ones are padded with :meth:`padded`."""
    gradient_bT: torch.Tensor
    """dL / d log pi(token), as the backward gave it (before any mean over ranks). 0 where there was none."""
    update: int = 0
    """The optimiser step, from 0 over all epochs of the rollout batch."""
    rank: int = 0
    outside_b: torch.Tensor | None = None
    """(b,) the largest |g| at positions that T does not hold (prompt, padding); ``None`` where it was not looked at."""
    width: int | None = None
    """Tokens that the padded micro-batch was wide in the loss; ``None``: T."""

    def padded(self, width: int) -> Piece:
        """The piece with T = ``width``, zeros after its own."""
        raise NotImplementedError


def measure(log_probs: torch.Tensor) -> Gradient:
    """Put a hook on a tensor of log-probabilities, of any shape, before the loss reads it.

    The tensor must require a gradient; without one, nothing is read and the gradient stays ``None``.
    """
    raise NotImplementedError


class Gradient:
    """The gradient of one tensor: ``values`` after the backward, ``None`` before; sums what several backwards gave."""

    log_probs: torch.Tensor
    """Detached, of the tensor."""
    values: torch.Tensor | None


class Watch:
    """Collects the pieces of a rollout batch."""

    pieces: list[Piece]

    def read(self, log_probs_bT: torch.Tensor, rows_b: Sequence[int] | torch.Tensor) -> None:
        """Read the gradient of a micro-batch. Call it before the loss, with the tensor that goes into the loss."""
        raise NotImplementedError

    def step(self) -> None:
        """Call it after each optimiser step."""
        raise NotImplementedError


@contextmanager
def watch() -> Iterator[Watch]:
    """A context that reads the gradients of a loop of one's own; ten lines in docs/receipt.md."""
    raise NotImplementedError
    yield
