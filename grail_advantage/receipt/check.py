"""Compare what each token received with what the loss says, and name what does not fit.

Shape suffixes: B responses of the rollout batch, T response tokens, U optimiser steps over all epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grail_advantage.receipt.losses import Batch, Loss
from grail_advantage.receipt.measure import Piece

NAMES = (
    "outside",
    "lost",
    "scaled",
    "scaled by micro-batch",
    "scaled by response",
    "shifted",
    "swapped",
    "repeated",
    "missing",
    "sign",
    "stale",
    "rounded",
    "extra",
    "not finite",
    "unknown loss",
    "unexplained",
)
"""Names of findings."""


@dataclass(frozen=True)
class Finding:
    """What does not fit, where, how large."""

    name: str
    """One of ``NAMES``."""
    where: str
    """Such as ``update 2, micro-batches 0 and 3``."""
    size: float
    """How large: the factor, the share of tokens or the ratio, as ``what`` says."""
    what: str
    """One sentence with the size."""
    examples: tuple[tuple[str, int, float, float], ...]
    """Three tokens at most: response (key or number), token, intended effective advantage, received one."""
    causes: str
    """The usual causes, one line."""
    mismatch: bool = True
    """False for a note: a property that the loss declares, or an unknown loss."""

    def to_dict(self) -> dict:
        """For JSON; ``Finding(**d)`` after ``examples`` became tuples again: :meth:`from_dict`."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict) -> Finding:
        """The inverse."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Four lines at most, for a terminal."""
        raise NotImplementedError


@dataclass(frozen=True)
class Receipt:
    """What arrived."""

    received_BT: torch.Tensor
    """float32: effective advantage e = -g D, the mean over the updates that the response was in; NaN where it was in none."""
    clipped_BT: torch.Tensor
    """float32: share of these updates in which the token was clipped; NaN likewise, and for an unknown loss."""
    received_UBT: torch.Tensor
    """float32: e by update; NaN for responses that the update does not hold."""
    expected_UBT: torch.Tensor
    """float32: what the loss says; NaN for an unknown loss."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No finding is a mismatch."""
        return not any(finding.mismatch for finding in self.findings)


def check(batch: Batch, loss: Loss, pieces: Sequence[Piece]) -> Receipt:
    """Compare the pieces of a rollout batch, of all ranks, micro-batches and updates, with the loss's settings.

    Raises:
        ValueError: a piece whose shape does not fit the batch.
    """
    raise NotImplementedError
