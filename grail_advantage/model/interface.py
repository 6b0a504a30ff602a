"""The interface between methods and a model: everything that a method may ask of any host.

A host (:mod:`grail_advantage.model.hugging_face`, :mod:`grail_advantage.verl_ext.engine_model`) implements what its methods
use. ``uses="saliency"``, as GRAIL: ``micro_batches``, ``leaf``, ``log_likelihood``, ``per_row``; ``"logits"``: also
``logits`` and ``at``; ``"sequences"``: ``sequences`` and ``sequences_together``; else ``micro_batches`` and the one method
of that name. Micro-batches, sharding and precision are the host's affair. Shape suffixes: B rows of an activation, S its
positions, D hidden, V vocabulary, K chosen positions of all rows, row after row, T response tokens, N sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from grail_advantage.model.hooks import at_head

if TYPE_CHECKING:
    from transformers import Cache

    from grail_advantage.data import Row

T = TypeVar("T")
Range = tuple[int, int]  # half-open, of positions of one row's prompt + response
Forward: TypeAlias = "Callable[[Tensor, Tensor, Cache | None], tuple[Tensor, Cache | None]]"
"""``forward(tokens_NS, kept_K, cache) -> (logits_NKV, cache)``: the model without gradients on rows of equal length
that follow the cache's tokens; logits at the columns ``kept_K`` of ``tokens_NS``; the cache with the new tokens."""


class MicroBatch(Protocol):
    """Rows, at least one, that go through the model together. All but ``leaf``, ``per_row`` and ``at`` are one forward."""

    rows: Sequence[Row]
    module: Module

    def leaf(self, name: str) -> Module:
        """The module whose output is the activation: ``embeddings``, ``first``, ``middle`` or ``last``, with ``n`` decoder
        blocks the hidden states 0, 1, n // 2 and n - 1, where 0 is the embeddings and k the output of block k. The model
        is bare or wrapped (FSDP, PEFT). ValueError: it does not expose its blocks as ``get_decoder().layers``."""
        model: Any = self.module
        if name == "embeddings":
            return model.get_input_embeddings()
        blocks = getattr(model.get_decoder(), "layers", None)
        if blocks is None:
            raise ValueError(
                f"leaf={name!r} needs get_decoder().layers, {type(model).__name__} lacks it; use embeddings"
            )
        n = len(blocks)
        k = {"first": 1, "middle": n // 2, "last": n - 1}[name]
        # Of a single block the middle and the last are hidden states 0.
        return model.get_input_embeddings() if k == 0 else blocks[k - 1]

    def forward(self) -> None:
        """Run the rows as a whole."""

    def log_likelihood(self, tokens: Sequence[Range]) -> Tensor:
        """Sum of the log-probabilities of a range of tokens of each row, given everything before them, at the sampling
        temperature; a float32 scalar. Ranges may be empty. Under sequence parallelism this rank's part."""

    def per_row(self, values_BS: Tensor) -> list[Tensor]:
        """Values at every position of activations, (S,) or with further dimensions for each row, gathered from all slices
        of it. May end before positions that the forward did not need."""

    def logits(self, positions: Sequence[Range]) -> Tensor:
        """Logits (K, V) at a range of positions of each row, part of the graph where gradients are on."""

    def at(self, row: int, position: int) -> tuple[int, int]:
        """Where a position of a row is in activations: row and column."""

    def response_log_probs(self) -> list[Tensor]:
        """For each row the log-probability (T,) of its response tokens at the sampling temperature."""

    def hidden_states(self) -> list[Tensor]:
        """For each row the input of the output embeddings at its response tokens, (T, D), in the model's dtype. Not with
        fused kernels."""
        captured_BSD: list[Tensor] = []

        def first_column(hidden_BSD: Tensor) -> Tensor:
            captured_BSD.append(hidden_BSD.detach())
            # The logits of one column are fewer than all.
            return hidden_BSD[:, :1]

        with at_head(self.module, first_column):
            self.forward()
        rows = zip(self.rows, self.per_row(captured_BSD[0]), strict=True)
        # Copies, with which the rest of the batch can go.
        return [hidden_SD[row.start :].clone() for row, hidden_SD in rows]


class Model(Protocol):
    """A model in evaluation mode, with its rows."""

    pad_token: int | None  # the tokenizer's
    step: int  # of training

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[MicroBatch], Sequence[T]], *, gradients: bool
    ) -> list[T]:
        """Run ``work`` on micro-batches that cover ``rows``; its results, one a row, in the order of the rows. Every
        rank runs as many micro-batches. Activations are on the model's device."""

    def sequences(self) -> AbstractContextManager[Forward]:
        """A forward for sequences that the method makes up. Ranks may call it a different number of times."""

    def sequences_together(self, length: int) -> int:
        """How many sequences of this length fit into one forward, at least 1."""


class RankRounds:
    """Keeps ranks in step whose parameters are sharded together: each announces its passes by :meth:`take`, and after its
    last runs a dummy pass for each round of :meth:`wait`, while another rank still has one."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device

    def take(self) -> None:
        self.most(1)

    def wait(self) -> Iterator[None]:
        # 0 of all ranks: no one has a pass left.
        while self.most(0):
            yield

    def most(self, value: float) -> float:
        """The largest of all ranks'."""
        if self.group is None:
            return value
        largest = torch.tensor(float(value), dtype=torch.float32, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return float(largest)


def places_of(ranges: Sequence[Range], device: torch.device) -> tuple[Tensor, Tensor]:
    """Every position of a range of each row: the row and the position, int64 (K,) each."""
    # Ranges (1, 3) and (0, 1) are the rows 0, 0, 1 and the positions 1, 2, 0.
    counts = torch.tensor([past - first for first, past in ranges], device="cpu")
    row_K = torch.arange(len(ranges), device="cpu").repeat_interleave(counts)
    position_K = torch.cat([torch.arange(first, past, device="cpu") for first, past in ranges])
    return row_K.to(device), position_K.to(device)


@contextmanager
def sequence_forward(
    model: Module, rounds: RankRounds, around: Callable[[], AbstractContextManager] = nullcontext
) -> Iterator[Forward]:
    """:meth:`Model.sequences` of a Hugging Face model in evaluation mode. Sharded parameters are gathered in every forward,
    ``around`` each of them, so a rank that is through runs forwards of one token until all are."""
    # Not above: naming the methods would import it.
    from grail_advantage.model.patches import release_waiting_hooks

    # A model with a state of its own does not continue from keys and values.
    caches = not any(getattr(module, "_is_stateful", False) for module in model.modules())

    def run(tokens_NS: Tensor, kept_K: Tensor, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        tokens_NS = tokens_NS.to(rounds.device)
        kept_K = kept_K.to(rounds.device)
        # The mask is also of the tokens whose keys and values the cache holds.
        attended = tokens_NS.shape[1] + (0 if cache is None else cache.get_seq_length())
        named: dict[str, Any] = {"attention_mask": tokens_NS.new_ones(len(tokens_NS), attended)}
        # A model with a state of its own may not know the argument.
        if cache is not None:
            named["past_key_values"] = cache
        # Of the forward before.
        release_waiting_hooks(model)
        with at_head(model, lambda hidden_BSD: hidden_BSD[:, kept_K]), around():
            output = model(input_ids=tokens_NS, use_cache=caches, **named)
        return output.logits, output.get("past_key_values")

    def forward(*arguments: Any) -> tuple[Tensor, Cache | None]:
        rounds.take()
        return run(*arguments)

    with torch.no_grad():
        yield forward
        nothing_11 = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
        for _ in rounds.wait():
            run(nothing_11, nothing_11[0], None)
