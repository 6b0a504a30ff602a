"""The interface between signals and a model: everything that a signal may ask of any host.

A host (:mod:`grail_advantage.model.hugging_face` with any Hugging Face model, :mod:`grail_advantage.verl_ext.engine_model` with
verl's FSDP engine) implements :class:`Model` and :class:`MicroBatch`. Signals are written against these two alone, so that each
is written once. Micro-batches, packing, sharding, sequence parallelism and precision are the host's affair.

Shape suffixes: B rows of an activation, S its positions, D hidden, V vocabulary, K chosen positions of all rows, one row after
the other, T response tokens, N sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from tqdm import tqdm

from grail_advantage.model.activations import capture_leaf, saliency

if TYPE_CHECKING:
    from transformers import Cache

    from grail_advantage.data import Row

T = TypeVar("T")
Range = tuple[int, int]
"""Half-open range of positions of one row's prompt + response."""
Forward: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, Cache | None], tuple[torch.Tensor, Cache | None]]"
"""``forward(tokens_NS, kept_K, cache) -> (logits_NKV, cache)``: the model without gradients on rows of equal length that follow
the cache's tokens; logits at the columns ``kept_K`` of ``tokens_NS``; the cache with the new tokens."""


class MicroBatch(ABC):
    """Rows that go through the model together. Each method that says so is one forward."""

    rows: Sequence[Row]
    """At least one."""

    @abstractmethod
    def leaf(self, name: str) -> nn.Module:
        """The module whose output is an activation, see :func:`grail_advantage.model.activations.leaf_module`."""

    @abstractmethod
    def logits(self, positions: Sequence[Range]) -> torch.Tensor:
        """One forward. Logits (K, V) at a range of positions of each row, part of the graph where gradients are on."""

    @abstractmethod
    def log_likelihood(self, tokens: Sequence[Range]) -> torch.Tensor:
        """One forward. Sum of the log-probabilities of a range of tokens of each row, given everything before them, at the
        sampling temperature; a float32 scalar. Empty ranges are allowed. Under sequence parallelism it is this rank's part."""

    @abstractmethod
    def response_log_probs(self) -> list[torch.Tensor]:
        """One forward. For each row the log-probability (T,) of its response tokens at the sampling temperature."""

    @abstractmethod
    def hidden_states(self) -> list[torch.Tensor]:
        """One forward. For each row the input of the output embeddings at its response tokens, after the final norm, (T, D),
        in the model's dtype."""

    @abstractmethod
    def at(self, row: int, position: int) -> tuple[int, int]:
        """Where a position of a row is in activations: their row, and their column."""

    @abstractmethod
    def per_row(self, values_BS: torch.Tensor) -> list[torch.Tensor]:
        """Values at every position of activations, (S,) for each row, gathered from all slices of it. May end before
        positions that the forward did not need."""


class Model(ABC):
    """A model in evaluation mode, with its rows."""

    pad_token: int | None
    """The tokenizer's."""
    step: int
    """Training step."""

    @abstractmethod
    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[MicroBatch], Sequence[T]], *, gradients: bool
    ) -> list[T]:
        """Run ``work`` on micro-batches that cover ``rows``; its results, one a row, in the order of the rows.

        Every rank runs as many micro-batches. Activations are on the model's device.
        """

    @abstractmethod
    def sequences(self) -> AbstractContextManager[Forward]:
        """A forward for sequences that the signal makes up. Ranks may call it a different number of times."""

    @abstractmethod
    def sequences_together(self, length: int) -> int:
        """How many sequences of this length fit into one forward, at least 1."""

    @abstractmethod
    def progress(self, total: int, what: str) -> AbstractContextManager[tqdm]:
        """A progress bar for a long pass."""


class RankRounds:
    """Keeps ranks in step whose parameters are sharded together: each announces its passes, and runs a dummy pass while another
    rank still has one."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device

    def take(self) -> None:
        """Before a pass of one's own."""
        self._others(1)

    def wait(self) -> Iterator[None]:
        """After one's last pass; one round for each pass that another rank still has."""
        while self._others(0):
            yield

    def _others(self, own: int) -> int:
        if self.group is None:
            return 0
        passes = torch.tensor(own, device=self.device)
        torch.distributed.all_reduce(passes, group=self.group)
        return int(passes)


def saliency_step(
    micro: MicroBatch, targets: Sequence[Range], leaf: str, backward: AbstractContextManager | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``|| dL/dh * h ||_2`` and ``|| dL/dh ||_2`` of each row's positions, float32, by one forward and one backward to h.

    Also a micro-batch without any target goes through both, since other ranks need its part in gathering parameters.

    Args:
        micro: the rows.
        targets: for each row the tokens whose negative log-likelihood is L, as a range of prompt + response.
        leaf: the activation h.
        backward: entered around the backward, to time it.
    """
    with capture_leaf(micro.leaf(leaf)) as leaves:
        loss = -micro.log_likelihood(targets)
    with backward or nullcontext():
        saliency_BS, norm_BS = saliency(loss, leaves[0])
    return list(zip(micro.per_row(saliency_BS), micro.per_row(norm_BS), strict=True))
