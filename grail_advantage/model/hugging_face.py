"""A Hugging Face causal language model as a host of signals: no packing, one row a micro-batch.

Shape suffixes: S positions of one row, T its response tokens, K chosen positions, V vocabulary, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, PassRow
from grail_advantage.model.activations import (
    CHUNK_POSITIONS,
    Targets,
    accepts_logits_to_keep,
    capture_hidden_states,
    evaluation_mode,
    leaf_module,
    log_probs_and_entropy,
    negative_log_likelihood,
    read_sum,
    sum_log_probs,
    works_in_chunks,
)
from grail_advantage.model.architecture import has_plain_logits
from grail_advantage.model.interface import Forward, MicroBatch, Model, Range, Turns

SEQUENCE_TOKENS = 16384
"""Most tokens of a signal's own sequences that go through the model together."""

_T = TypeVar("_T")


class HuggingFaceModel(Model):
    """A Hugging Face model, one row a micro-batch.

    Args:
        model: bare or wrapped.
        tokenizer: the tokenizer that the token ids belong to.
        temperature: sampling temperature.
        device: of the rows.
        group: ranks whose parameters are sharded together.
        step: training step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        temperature: float,
        device: torch.device,
        group: ProcessGroup | None,
        step: int,
    ) -> None:
        self.step = step
        self.model = model
        self.temperature = temperature
        self.pad_token = tokenizer.pad_token_id
        self.device = device
        self.turns = Turns(group, device)

    def micro_batches(
        self, rows: Sequence[PassRow], work: Callable[[OneRow], Sequence[_T]], *, gradients: bool
    ) -> list[_T]:
        results: list[_T] = []
        with evaluation_mode(self.model), torch.set_grad_enabled(gradients):
            for row in rows:
                self.turns.take()
                results += work(OneRow(self, row))
            for _ in self.turns.wait():
                work(OneRow(self, self._dummy()))
        return results

    @contextmanager
    def sequences(self) -> Iterator[Forward]:

        def forward(
            tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
        ) -> tuple[torch.Tensor, Cache | None]:
            self.turns.take()
            return self.logits(tokens_NS, kept_K, cache, use_cache=True)

        with evaluation_mode(self.model), torch.no_grad():
            self.model.eval()  # no checkpointing either: checkpointed blocks keep no keys and values
            yield forward
            nothing_11 = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            for _ in self.turns.wait():
                self.logits(nothing_11, nothing_11[0], None, use_cache=True)

    def sequences_together(self, length: int) -> int:
        return max(1, SEQUENCE_TOKENS // length)

    def progress(self, total: int, what: str) -> tqdm:
        """See :class:`Model`; on a terminal."""
        return tqdm(total=total, desc=what, disable=None, leave=False)

    def logits(
        self, tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None = None, **options: bool
    ) -> tuple[torch.Tensor, Cache | None]:
        """Logits (N, K, V) at the columns ``kept_K``, and the cache of the forward; ``cache`` holds the tokens before."""
        cached = cache.get_seq_length() if cache is not None else 0
        attention_mask = tokens_NS.new_ones(tokens_NS.shape[0], cached + tokens_NS.shape[1])
        keep = {"logits_to_keep": kept_K} if accepts_logits_to_keep(self.model) else {}
        past = {"past_key_values": cache} if cache is not None else {}
        output = self.model(input_ids=tokens_NS, attention_mask=attention_mask, **past, **keep, **options)
        return output.logits if keep else output.logits[:, kept_K], output.get("past_key_values")

    def _dummy(self) -> PassRow:
        tokens_2 = torch.zeros(2, dtype=torch.int64, device=self.device)
        return PassRow(tokens_2, 1, 1, AnswerSpan(0, 0, 1, 1), advantage=-1.0, group=-1, place=0)


class OneRow(MicroBatch):
    """A single row without padding. Its forwards end at the last position that a caller asks for."""

    def __init__(self, model: HuggingFaceModel, row: PassRow) -> None:
        self.model = model
        self.row = row
        self.rows = [row]

    def leaf(self, name: str) -> nn.Module:
        return leaf_module(self.model.model, name)

    def logits(self, positions: Sequence[Range]) -> torch.Tensor:
        ((start, stop),) = positions
        kept_K = torch.arange(start, stop, device=self.row.tokens_S.device)
        logits_1KV, _ = self.model.logits(self.row.tokens_S[None, :stop], kept_K, use_cache=False)
        return logits_1KV[0]

    def log_likelihood(self, tokens: Sequence[Range]) -> torch.Tensor:
        ((first, past),) = tokens
        tokens_K, model = self.row.tokens_S[first:past], self.model.model
        head = model.get_output_embeddings()
        if past - first > CHUNK_POSITIONS and works_in_chunks(head) and has_plain_logits(model):
            column_K = torch.arange(first - 1, past - 1, device=tokens_K.device)
            targets = Targets(tokens_K, torch.zeros_like(column_K), column_K)
            tokens_1S = self.row.tokens_S[None, : past - 1]
            with sum_log_probs(head, targets, self.model.temperature):
                output = model(input_ids=tokens_1S, attention_mask=torch.ones_like(tokens_1S), use_cache=False)
            return read_sum(output.logits)
        logits_KV = self.logits([(first - 1, past - 1)])
        return -negative_log_likelihood(logits_KV, tokens_K, self.model.temperature)

    def response_log_probs(self) -> list[torch.Tensor]:
        return [self.statistics(entropy=False)[OLD_LOG_PROBS]]

    def hidden_states(self) -> list[torch.Tensor]:
        head = self.model.model.get_output_embeddings()
        tokens_1S = self.row.tokens_S[None]
        with capture_hidden_states(head) as captured:
            self.model.model(input_ids=tokens_1S, attention_mask=torch.ones_like(tokens_1S), use_cache=False)
        return [captured[0][0, self.row.response_start :]]

    def at(self, row: int, position: int) -> tuple[int, int]:
        return row, position

    def per_row(self, values_BS: torch.Tensor) -> list[torch.Tensor]:
        return [values_BS[0]]

    def statistics(self, *, entropy: bool) -> dict[str, torch.Tensor]:
        """One forward. Log-probability and, where asked for, entropy of each response token, (T,) float32."""
        start, length = self.row.response_start, len(self.row.tokens_S)
        logits_TV = self.logits([(start - 1, length - 1)])
        log_probs_T, entropy_T = log_probs_and_entropy(
            logits_TV, self.row.tokens_S[start:], self.model.temperature, entropy=entropy
        )
        return {OLD_LOG_PROBS: log_probs_T} if entropy_T is None else {OLD_LOG_PROBS: log_probs_T, ENTROPY: entropy_T}
