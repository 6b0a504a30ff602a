"""The measurement: the gradient of the loss with respect to each token's log-probability, read by a hook.

It costs one (b, T) tensor a micro-batch, no backward more, and changes nothing.

Shape suffixes: b responses of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Piece:
    """A micro-batch of an optimiser step, on one rank."""

    # (b,) int64: which responses of the rollout batch it holds, by their places there
    rows_b: Tensor
    # As they went into the loss, detached; T as in Batch, or less, without positions at the end
    log_probs_bT: Tensor
    # DL / d log pi(token), as the backward gave it (before any mean over ranks)
    gradient_bT: Tensor
    update: int = 0  # the optimiser step, from 0 over all epochs of the rollout batch
    rank: int = 0
    # (b,) how much of a gradient is at positions that T does not hold (prompt, padding); 0: none
    outside_b: Tensor | None = None
    width: int | None = None  # tokens that the padded micro-batch was wide in the loss; None: T

    def padded(self, width: int) -> Piece:
        """The piece with T = ``width``, zeros after its own."""
        length = self.log_probs_bT.shape[1]
        missing = (0, width - length)
        return replace(
            self,
            log_probs_bT=pad(self.log_probs_bT, missing),
            gradient_bT=pad(self.gradient_bT, missing),
            width=self.width or length,
        )


class Gradient:
    """The gradient of one tensor of log-probabilities, of any shape, by a hook that is put on before the loss reads it.

    ``values`` is ``None`` before the backward, and without one (in evaluation); the sum of what several backwards gave.
    """

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs.detach()
        self.values: Tensor | None = None
        self._hook = log_probs.register_hook(self._add) if log_probs.requires_grad else None

    def close(self) -> None:
        """Take the hook off; a backward after it is not read."""
        if self._hook is not None:
            self._hook.remove()

    def _add(self, gradient: Tensor) -> None:
        # A copy: autograd may go on to add into the tensor that it passes.
        if self.values is None:
            self.values = gradient.detach().clone()
        else:
            self.values = self.values + gradient


class Watch:
    """Collects the pieces of a rollout batch; within its context the hooks are on."""

    def __init__(self) -> None:
        self._read: list[tuple[Gradient, Tensor, int, int, float]] = []
        self._update = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        for gradient, *_ in self._read:
            gradient.close()

    def read(self, log_probs_bT: Tensor, rows_b: Any, *, rank: int = 0, scale: float = 1.0) -> None:
        """Read the gradient of a micro-batch. Call it before the loss, with the tensor that goes into the loss.

        Args:
            log_probs_bT: (b, T) of the sampled tokens.
            rows_b: places of its responses in the rollout batch of all ranks; integers, a tensor or a list.
            rank: the data-parallel rank.
            scale: AMP's loss scale: of the loss before the backward, divided out before the step.
        """
        rows_b = torch.as_tensor(rows_b, device="cpu")
        shape = tuple(log_probs_bT.shape)
        if len(shape) != 2 or shape[0] != len(rows_b):
            raise ValueError(
                f"log_probs_bT has shape {shape} for {len(rows_b)} rows: give one row for each response"
            )
        self._read.append((Gradient(log_probs_bT), rows_b, self._update, rank, scale))

    def around(self, loss: Callable[..., Any], rows_b: Any, **named: Any) -> Callable[..., Any]:
        """The loss, whose first argument is the (b, T) log-probabilities, with a look at them by :meth:`read`."""

        def watched(log_probs_bT: Tensor, *arguments: Any, **keywords: Any) -> Any:
            self.read(log_probs_bT, rows_b, **named)
            return loss(log_probs_bT, *arguments, **keywords)

        return watched

    def step(self) -> None:
        """Call it after each optimiser step."""
        self._update += 1

    @property
    def pieces(self) -> list[Piece]:
        """The micro-batches so far; one without a backward has gradient 0."""
        result = []
        for gradient, rows_b, update, rank, scale in self._read:
            gradient_bT = torch.zeros_like(gradient.log_probs)
            if gradient.values is not None:
                gradient_bT = gradient.values / scale
            result.append(Piece(rows_b, gradient.log_probs, gradient_bT, update, rank))
        return result


watch = Watch
