"""A Hugging Face causal language model as a host of methods: several rows a forward, sorted by length, no packing.

Rows are padded on the right, and the attention mask does not tell: nothing in a causal model sees what comes after it,
so that each row computes what it does alone, with the same kernels. Before its first rows that go together a model is
asked whether that is so (:mod:`grail_advantage.model.probe`); where it is not, rows run one at a time. Shape suffixes: B
rows of a micro-batch, S their positions, T response tokens, K chosen positions of all rows, V vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Row, RowScores
from grail_advantage.model import hooks
from grail_advantage.model.interface import (
    Forward,
    MicroBatch,
    Range,
    RankRounds,
    T,
    places_of,
    sequence_forward,
)
from grail_advantage.model.patches import release_waiting_hooks
from grail_advantage.model.probe import Finding, probe, probe_rows, reads_its_logits, whole_row

if TYPE_CHECKING:
    from grail_advantage.method import BaseMethod

logger = logging.getLogger(__name__)

# Of a longer row, with which one joins it: a quarter of a forward may be padding
LEAST_LENGTH = 0.75
CHECKED_TOKENS = 18  # of the row by which a model's logits are checked
# Of each model: its lowered budget of tokens where memory ran out; what the probe found, and with how many tokens of the
# longest row; whether its logits are read where they are.
_fitting_tokens: WeakKeyDictionary[Module, int] = WeakKeyDictionary()
_findings: WeakKeyDictionary[Module, tuple[Any, int, Finding]] = WeakKeyDictionary()
_checked: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


def run_rows(method: BaseMethod, rows: Sequence[Row], model: HuggingFaceModel) -> list[RowScores]:
    """The model's side of :meth:`grail_advantage.weigh.Host.scores`: scores, on the CPU, of rows that
    :func:`grail_advantage.weigh.weigh` prepared, in their order. A worker that has the model in another process calls it
    with its share of the rows::

        def token_scores(self, method, rows, step):  # on a worker
            model = HuggingFaceModel(self.module, self.tokenizer, temperature=0.9, device=self.device, step=step)
            return run_rows(method, rows, model)

    Where parameters are sharded (``group=``), every rank of the group calls it, also one without rows."""
    return [scores.on_cpu() for scores in _on_rows(rows, model, partial(method.run, model=model))]


def read_columns(
    names: Sequence[str], rows: Sequence[Row], model: HuggingFaceModel
) -> list[dict[str, Tensor]]:
    """The model's side of :meth:`grail_advantage.weigh.Host.columns`: for each row the ``old_log_probs`` and ``entropy``
    of its response tokens, those that are named, (T,) float32 on the CPU. Ranks call it as :func:`run_rows`."""

    def read(moved: list[Row]) -> list[dict[str, Tensor]]:
        return model.micro_batches(moved, lambda micro: micro.columns(names), gradients=False)

    columns_of_rows = _on_rows(rows, model, read)
    return [
        {name: values_T.cpu() for name, values_T in columns.items()} for columns in columns_of_rows
    ]


def _on_rows(
    rows: Sequence[Row], model: HuggingFaceModel, work: Callable[[list[Row]], list[T]]
) -> list[T]:
    """Work on rows that are where the model is. Without rows there is none, unless other ranks wait in a collective."""
    if not rows and model.rounds.group is None:
        return []
    # The caller may be in inference mode, and nothing made there can take part in a backward.
    with torch.inference_mode(False):
        model.check_logits([row.tokens for row in rows])
        moved = [replace(row, tokens=row.tokens.to(model.device)) for row in rows]
        return model.fitting(lambda: work(moved))


class HuggingFaceModel:
    """A Hugging Face model, bare or wrapped, as :class:`grail_advantage.model.interface.Model`.

    Args:
        model: in any mode; it is in evaluation mode within a pass alone.
        tokenizer: its padding token is what OAR-P puts in place of a token; ``None`` where no method needs one.
        temperature: of the sampling.
        device: where the model reads tokens.
        group: of the ranks whose parameters are sharded together.
        step: of training.
        tokens: most of a forward, padding counted; a longer row runs alone. Halved where memory runs out, unless other
            ranks wait.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        step: int = 0,
        tokens: int = hooks.FORWARD_TOKENS,
    ) -> None:
        self.model = model
        self.temperature = float(temperature)
        self.device = torch.device(device)
        self.step = step
        self.pad_token = getattr(tokenizer, "pad_token_id", None)
        self.rounds = RankRounds(group, self.device)
        self.tokens = min(tokens, _fitting_tokens.get(model, tokens))
        # Of the model in this pass; each look at it walks through all its modules
        self._state: object = None
        self._together = 1

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[PaddedRows], Sequence[T]], *, gradients: bool
    ) -> list[T]:
        # The longest first: where memory does not do, it shows at once.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
        waiting = [rows[index] for index in order]
        results = list[T]()

        def run_next() -> Sequence[T]:
            longest = len(waiting[0].tokens)
            candidates = waiting[: 1 if alone else self.sequences_together(longest)]
            together = [row for row in candidates if len(row.tokens) >= LEAST_LENGTH * longest]
            return work(PaddedRows(self, together))

        frozen = hooks.frozen_parameters(self.model) if self.rounds.group is None else nullcontext()
        with hooks.evaluation_mode(self.model), frozen, torch.set_grad_enabled(gradients):
            alone = not self._independent(waiting)
            while waiting:
                self.rounds.take()
                finished = self.fitting(run_next)
                results += finished
                waiting = waiting[len(finished) :]
            # Ranks that have rows gather parameters in each forward, in which this one takes part with two tokens.
            for _ in self.rounds.wait():
                work(self._of_nobody([torch.zeros(2, dtype=torch.int64)]))
        results_of = dict(zip(order, results, strict=True))
        return [results_of[index] for index in range(len(rows))]

    @contextmanager
    def sequences(self) -> Iterator[Forward]:
        with (
            hooks.evaluation_mode(self.model),
            sequence_forward(self.model, self.rounds) as forward,
        ):
            self.model.eval()  # no checkpointing either: checkpointed blocks keep no keys and values
            yield forward

    def sequences_together(self, length: int) -> int:
        self._together = max(1, self.tokens // length)
        return self._together

    def fitting(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which runs again with half the budget of tokens for as long as memory runs out.
        RuntimeError: memory does not do for one row, or is short on one of several ranks."""
        while True:
            self._together = 1  # work that does not ask how many rows go together has one
            try:
                return work()
            except RuntimeError as error:
                out_of_memory = isinstance(
                    error, torch.OutOfMemoryError
                ) or "DefaultCPUAllocator: " in str(error)
                if not out_of_memory or self._together == 1 or self.rounds.group is not None:
                    raise
            # After the clause, with which the error's frames and their tensors go.
            self.tokens //= 2
            _fitting_tokens[self.model] = self.tokens
            logger.warning(
                "memory ran out in a pass: %d tokens go together now; set tokens lower", self.tokens
            )

    def check_logits(self, rows: Sequence[Tensor]) -> None:
        """ValueError for a model whose logits are not one for each token of its input, as with a soft prompt in front;
        it is asked once, by all ranks. ``rows``: prompt + response of the run, int64 (S,) each; there may be none."""
        self._state = model_state(self.model)
        if _checked.get(self.model) == self._state:
            return
        refusal = ValueError(
            f"model ({type(self.model).__name__}) gives no logits, or has other positions than its input; "
            f"{hooks.REMEDY}, itself, and an adapter such as LoRA in place of virtual tokens"
        )
        tokens_S = rows[0] if rows else torch.zeros(2, dtype=torch.int64, device="cpu")
        tokens_S = tokens_S[:CHECKED_TOKENS].to(self.device)
        ids_1S = tokens_S[None, :-1]

        def own() -> Tensor:
            logits: Any = getattr(self.forward(ids_1S), "logits", None)
            if getattr(logits, "shape", ())[:-1] != ids_1S.shape:
                raise refusal
            return hooks.log_probs(logits[0], tokens_S[1:], self.temperature)

        def backwards() -> Tensor:
            """Of a model that only scales or caps each position's logits the order of positions changes none."""
            with hooks.at_head(self.model, lambda hidden_BSD: hidden_BSD.flip(1)):
                logits_1SV = self.forward(ids_1S).logits
            return hooks.log_probs(logits_1SV[0].flip(0), tokens_S[1:], self.temperature)

        with hooks.evaluation_mode(self.model):
            if not reads_its_logits(self.model, own, backwards):
                raise refusal
        _checked[self.model] = self._state

    def forward(self, tokens_BS: Tensor) -> Any:
        """The model's output for rows of tokens, padding on the right included."""
        release_waiting_hooks(self.model)  # of the forward before
        return self.model(
            input_ids=tokens_BS, attention_mask=torch.ones_like(tokens_BS), use_cache=False
        )

    def _of_nobody(self, tokens: Sequence[Tensor]) -> PaddedRows:
        return PaddedRows(self, [whole_row(tokens_S.to(self.device)) for tokens_S in tokens])

    def _independent(self, rows: Sequence[Row]) -> bool:
        """Whether rows, the longest first, are the same together as alone. A model is asked again when a row is longer
        than any before. A collective of the ranks, which ask together."""
        longest = int(self.rounds.most(len(rows[0].tokens) if len(rows) > 1 else 0))
        # No rank has two rows.
        if not longest:
            return True
        state = self._state or model_state(self.model)
        state_asked, length_asked, finding = _findings.get(self.model, (None, 0, None))
        if finding is None or state_asked != state or (longest > length_asked and finding.holds):
            # A rank without rows has this one to draw from.
            some_token = torch.zeros(1, dtype=torch.int64, device="cpu")
            tokens = torch.cat([some_token, *(row.tokens.cpu() for row in rows)])

            def ask() -> Finding:
                trial = probe_rows(tokens, longest=longest, rows=self.sequences_together(longest))
                return probe(
                    self.model, lambda tokens: self._of_nobody(tokens).response_log_probs(), trial
                )

            finding = self.fitting(ask)
            # The largest of all ranks', so that they go on alike.
            finding = replace(finding, difference=self.rounds.most(finding.difference))
            _findings[self.model] = state, longest, finding
            if not finding.holds:
                logger.warning("%s: responses go through the model one at a time", finding)
        return finding.holds


class PaddedRows(MicroBatch):
    """Rows padded on the right, as :class:`grail_advantage.model.interface.MicroBatch`. Forwards end at the last position
    that a caller asks for."""

    def __init__(self, model: HuggingFaceModel, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._host = model
        self.module = model.model
        self._tokens_BS = pad_sequence([row.tokens for row in rows], batch_first=True)
        # Positions that the latest forward was for.
        self._lengths = [len(row.tokens) for row in rows]

    def logits(self, positions: Sequence[Range]) -> Tensor:
        row_K, column_K = places_of(positions, self._tokens_BS.device)
        with hooks.at_head(self.module, lambda hidden_BSD: hidden_BSD[row_K, column_K][None]):
            return self._forward(positions).logits[0]

    def log_likelihood(self, tokens: Sequence[Range]) -> Tensor:
        return hooks.log_probs(*self._predicted(tokens), self._host.temperature).sum()

    def response_log_probs(self) -> list[Tensor]:
        return [columns[OLD_LOG_PROBS] for columns in self.columns([OLD_LOG_PROBS])]

    def forward(self) -> None:
        self._forward([(0, len(row.tokens)) for row in self.rows])

    def at(self, row: int, position: int) -> tuple[int, int]:
        return row, position

    def per_row(self, values_BS: Tensor) -> list[Tensor]:
        return [row_S[:length] for row_S, length in zip(values_BS, self._lengths, strict=True)]

    def columns(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """One forward, without gradients. For each row the log-probabilities and the entropies of its response tokens,
        those that are named, (T,) float32."""
        logits_KV, tokens_K = self._predicted([(row.start, len(row.tokens)) for row in self.rows])
        counts = [len(row.tokens) - row.start for row in self.rows]
        temperature = self._host.temperature
        columns = {}
        if OLD_LOG_PROBS in names:
            columns[OLD_LOG_PROBS] = hooks.log_probs(logits_KV, tokens_K, temperature).split(counts)
        if ENTROPY in names:
            columns[ENTROPY] = hooks.entropies(logits_KV, temperature).split(counts)
        return [
            {name: of_rows[row] for name, of_rows in columns.items()}
            for row in range(len(self.rows))
        ]

    def _predicted(self, tokens: Sequence[Range]) -> tuple[Tensor, Tensor]:
        """One forward. The logits (K, V) that predict a range of tokens of each row, and the tokens, (K,)."""
        tokens_K = torch.cat(
            [row.tokens[first:past] for row, (first, past) in zip(self.rows, tokens, strict=True)]
        )
        return self.logits([(first - 1, past - 1) for first, past in tokens]), tokens_K

    def _forward(self, positions: Sequence[Range]) -> Any:
        """Up to the last of the positions of each row."""
        self._lengths = [past for _, past in positions]
        return self._host.forward(self._tokens_BS[:, : max(1, *self._lengths)])


def model_state(model: Module) -> object:
    """What may change in a loaded model and changes what it answered: its layers, as by an adapter, their precision, and
    the attention that it takes."""
    layers = tuple(type(module) for module in model.modules())
    precisions = frozenset(parameter.dtype for parameter in model.parameters())
    return layers, precisions, getattr(getattr(model, "config", None), "_attn_implementation", None)
