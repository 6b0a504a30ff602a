"""The measurement: the gradient of the loss with respect to each token's log-probability, read by a hook.

It costs one (b, T) tensor a micro-batch, no backward more, and changes nothing.

Shape suffixes: b responses of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad


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
        own = self.log_probs_bT.shape[1]
        log_probs_bT, gradient_bT = (pad(each, (0, width - own)) for each in (self.log_probs_bT, self.gradient_bT))
        return replace(self, log_probs_bT=log_probs_bT, gradient_bT=gradient_bT, width=self.width or own)


class Gradient:
    """The gradient of one tensor of log-probabilities, of any shape, by a hook that is put on it before the loss reads it."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs = log_probs.detach()
        """What went into the loss."""
        self.values: torch.Tensor | None = None
        """``None`` before the backward, and without one (in evaluation); the sum of what several backwards gave."""
        if log_probs.requires_grad:
            log_probs.register_hook(self._add)

    def _add(self, gradient: torch.Tensor) -> None:
        self.values = gradient.detach().clone() if self.values is None else self.values + gradient


class Watch:
    """Collects the pieces of a rollout batch; see :func:`watch`."""

    def __init__(self) -> None:
        self._read: list[tuple[Gradient, torch.Tensor, int]] = []
        self._update = 0

    def read(self, log_probs_bT: torch.Tensor, rows_b: Sequence[int] | torch.Tensor) -> None:
        """Read the gradient of a micro-batch. Call it before the loss, with the tensor that goes into the loss."""
        self._read.append((Gradient(log_probs_bT), torch.as_tensor(rows_b), self._update))

    def step(self) -> None:
        """Call it after each optimiser step."""
        self._update += 1

    @property
    def pieces(self) -> list[Piece]:
        """The micro-batches so far; one without a backward has gradient 0."""
        return [
            Piece(
                rows_b, each.log_probs, torch.zeros_like(each.log_probs) if each.values is None else each.values, update
            )
            for each, rows_b, update in self._read
        ]


@contextmanager
def watch() -> Iterator[Watch]:
    """A context that reads the gradients of a loop of one's own; ten lines in docs/receipt.md."""
    yield Watch()
