"""Whether the forward that keeps the graph of selected rows also keeps the activations of checkpointed blocks.

With gradient checkpointing the backward of a saliency computes each block a second time. A forward that keeps its activations
does not need to, and gives the same scores. :class:`KeptActivations` bounds its micro-batches by the memory that the process
has needed for an update already, so it works from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

KEEP = "keep_activations"
"""Setting of a batch: ``"auto"``, ``True`` or ``False``."""
SHARE = 0.6
"""Of the memory that an update needs beyond what is held between passes. The rest is for the backward's own tensors."""


@dataclass(frozen=True)
class Part:
    """Some of the rows, and how their forward runs."""

    rows: slice
    keep: bool = False
    most_tokens: int | None = None
    """Of a micro-batch on one rank; ``None`` for those of the update."""


class KeptActivations:
    """One rank's measurements, of the memory that updates take and that activations take, and what follows from them."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """Bytes that updates peaked at; ``None`` before the first one."""
        self.bytes_per_token = 0.0
        """Of kept activations, the most so far; 0 before the first measurement."""
        self.share = SHARE

    def parts(self, engine: FSDPEngineWithLMHead, choice: str | bool, longest: int) -> list[Part]:
        """How the rows of all ranks are run; the same parts on every rank. A collective of all ranks.

        Args:
            engine: verl's FSDP engine.
            choice: the batch's setting ``KEEP``.
            longest: tokens of this rank's longest row.
        """
        model, everything = engine.model_config, slice(None)
        if not (choice and (model.enable_gradient_checkpointing or model.enable_activation_offload)):
            return [Part(everything)]
        if choice is True:
            return [Part(everything, keep=True)]
        # The CPU does not say how much memory is allocated, and micro-batches of a fixed size have no budget.
        if get_device_name() == "cpu" or not engine.engine_config.use_dynamic_bsz:
            return [Part(everything)]
        if not self.bytes_per_token:
            return [Part(slice(0, 1), keep=True), Part(slice(1, None))]
        values = torch.tensor([self.tokens(get_torch_device().memory_allocated()), -longest], device=get_device_name())
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MIN)
        least, of_all = int(values[0]), -int(values[1])
        fits = least * engine.ulysses_sequence_parallel_size >= of_all
        return [Part(everything, keep=True, most_tokens=least) if fits else Part(everything)]

    def tokens(self, held: int) -> int:
        """The most tokens of a micro-batch on this rank, with so many bytes allocated before it."""
        if self.limit is None or not self.bytes_per_token:
            return 0
        return max(0, int(self.share * (self.limit - held) / self.bytes_per_token))

    def note_update(self, peaks: tuple[int, int]) -> None:
        """Note the most bytes that were allocated, up to the start of an update and up to its end."""
        before, after = peaks
        if self.limit is None or after > before:
            self.limit = after

    def note_forward(self, tokens: float, held: tuple[int, int], peaks: tuple[int, int]) -> None:
        """Note a forward that kept the activations of so many tokens: bytes allocated before and after it, and the most that
        were allocated up to its start and up to its backward's end. Above the limit, half as much is kept from now on."""
        self.bytes_per_token = max(self.bytes_per_token, (held[1] - held[0]) / tokens)
        if self.limit is not None and peaks[1] > max(self.limit, peaks[0]):
            self.share /= 2

    @contextmanager
    def update(self) -> Iterator[None]:
        """Measures an update."""
        before = _peak()
        yield
        if before is not None:
            self.note_update((before, _peak()))

    @contextmanager
    def forward(self, tokens: float) -> Iterator[Callable[[], None]]:
        """Measures a forward and its backward; what it gives is called between the two."""
        held, before = [_held()], _peak()
        yield lambda: held.append(_held())
        if before is not None:
            self.note_forward(tokens, (held[0], held[1]), (before, _peak()))


def _held() -> int | None:
    """Bytes of this rank's device that are allocated."""
    return None if get_device_name() == "cpu" else get_torch_device().memory_allocated()


def _peak() -> int | None:
    """The most that ever were."""
    return None if get_device_name() == "cpu" else get_torch_device().max_memory_allocated()
