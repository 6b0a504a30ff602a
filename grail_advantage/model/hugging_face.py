"""A Hugging Face causal language model as a host of signals: several rows a forward, sorted by length, no packing.

Rows are padded on the right, and the attention mask does not tell: nothing in a causal model sees what comes after it, so that
each row computes what it does alone, with the same kernels. Before its first rows that go together a model is asked whether
that is so (:mod:`grail_advantage.model.probe`); where it is not, rows run one at a time.

Shape suffixes: B rows of a micro-batch, S their positions, T response tokens, K chosen positions of all rows, V vocabulary,
N sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Row
from grail_advantage.model.activations import (
    CHUNK_POSITIONS,
    FORWARD_TOKENS,
    Targets,
    accepts_logits_to_keep,
    capture_hidden_states,
    capture_log_probs,
    evaluation_mode,
    keep_positions,
    keeps_keys_and_values,
    leaf_module,
    log_probs_and_entropy,
    negative_log_likelihood,
    read_sum,
    sum_log_probs,
    works_in_chunks,
)
from grail_advantage.model.architecture import has_plain_logits
from grail_advantage.model.interface import Forward, MicroBatch, Model, Range, RankRounds
from grail_advantage.model.probe import ROW, Finding, check_positions, probe, probe_rows, whole_row

logger = logging.getLogger(__name__)

LEAST_LENGTH = 0.75
"""A row joins a longer one only if it has at least this share of its tokens: at most a quarter of a forward is padding."""
PROGRESS_SECONDS = 5
"""A pass that shows its progress does so when it takes longer than this."""
_fitting_tokens: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The lowered budget of tokens of each model that ran out of memory."""
_findings: WeakKeyDictionary[nn.Module, tuple[int, Finding]] = WeakKeyDictionary()
"""For each model what the probe found, and with how many tokens of the longest row."""
_in_place: WeakSet[nn.Module] = WeakSet()
"""Models whose positions are their input's."""

_T = TypeVar("_T")


class HuggingFaceModel(Model):
    """A Hugging Face model.

    Args:
        model: bare or wrapped.
        tokenizer: the tokenizer that the token ids belong to.
        temperature: sampling temperature.
        device: of the rows.
        group: ranks whose parameters are sharded together.
        step: training step.
        tokens: most tokens of a forward, padding counted; a longer row runs alone. It is halved where memory runs out, unless
            other ranks wait.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        temperature: float,
        device: torch.device,
        group: ProcessGroup | None,
        step: int,
        tokens: int = FORWARD_TOKENS,
    ) -> None:
        self.step = step
        self.model = model
        self.temperature = temperature
        self.pad_token = tokenizer.pad_token_id
        self.device = device
        self.rounds = RankRounds(group, device)
        self.tokens = min(tokens, _fitting_tokens.get(model, tokens))
        self._together = 1

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[PaddedRows], Sequence[_T]], *, gradients: bool
    ) -> list[_T]:
        results: list[Any] = [None] * len(rows)
        # The longest first: where memory does not do, it shows at once.
        waiting = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))

        def run_next() -> Sequence[_T]:
            longest = len(rows[waiting[0]].tokens)
            some = [rows[index] for index in waiting[: 1 if alone else self.sequences_together(longest)]]
            return work(PaddedRows(self, [row for row in some if len(row.tokens) >= LEAST_LENGTH * longest]))

        bar = self.progress(len(rows), "responses")
        with evaluation_mode(self.model), torch.set_grad_enabled(gradients), bar:
            alone = not self._independent([rows[index] for index in waiting])
            while waiting:
                self.rounds.take()
                of_rows = self.fitting(run_next)
                for index, result in zip(waiting[: len(of_rows)], of_rows, strict=True):
                    results[index] = result
                waiting = waiting[len(of_rows) :]
                bar.update(len(of_rows))
            for _ in self.rounds.wait():
                work(PaddedRows(self, [self._dummy()]))
        return results

    @contextmanager
    def sequences(self) -> Iterator[Forward]:
        def forward(
            tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
        ) -> tuple[torch.Tensor, Cache | None]:
            self.rounds.take()
            return self._logits(tokens_NS, kept_K, cache)

        with evaluation_mode(self.model), torch.no_grad():
            self.model.eval()  # no checkpointing either: checkpointed blocks keep no keys and values
            yield forward
            nothing_11 = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            for _ in self.rounds.wait():
                self._logits(nothing_11, nothing_11[0], None)

    def sequences_together(self, length: int) -> int:
        self._together = max(1, self.tokens // length)
        return self._together

    def progress(self, total: int, what: str) -> tqdm:
        """See :class:`Model`; on a terminal."""
        return tqdm(total=total, desc=what, disable=None, leave=False, delay=PROGRESS_SECONDS)

    def fitting(self, work: Callable[[], _T]) -> _T:
        """What ``work`` gives, which runs again with half the budget of tokens for as long as memory runs out.

        Raises:
            RuntimeError: memory does not do for one row, or is short on one of several ranks.
        """
        while True:
            self._together = 1  # work that does not ask how many rows go together has one
            try:
                return work()
            except RuntimeError as error:
                if not _is_out_of_memory(error) or self._together == 1 or self.rounds.group is not None:
                    raise
            # After the clause, with which the error's frames and their tensors go.
            self.tokens //= 2
            _fitting_tokens[self.model] = self.tokens
            _warn_of_memory()

    def check_positions(self, rows: Sequence[torch.Tensor]) -> None:
        """Refuse a model whose positions are not its input's, once; a collective of the ranks.

        Args:
            rows: prompt + response of the run, int64 (S,) each; there may be none.

        Raises:
            ValueError: with what was found, and the remedy.
        """
        check_no_virtual_tokens(self.model)
        if self.model in _in_place:
            return
        first, *others = self._distinct(rows)
        if others:
            generator = torch.Generator().manual_seed(0)
            drawn = [
                ([first, *others])[int(k)] for k in torch.randint(len(others) + 1, (ROW - 3,), generator=generator)
            ]
            tokens_S = torch.tensor([first, others[0], first, *drawn], device=self.device)
            temperature, self.temperature = self.temperature, 1.0

            def logits(tokens_S: torch.Tensor) -> torch.Tensor:
                ids_1S = tokens_S.unsqueeze(0)
                output = self.model(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S), use_cache=False)
                values = getattr(output, "logits", None)
                if not isinstance(values, torch.Tensor) or values.ndim != 3:
                    raise ValueError(
                        f"model ({type(self.model).__name__}) gives no logits (B, S, V); pass a causal language model, such as "
                        "AutoModelForCausalLM loads"
                    )
                return values[0]

            def run(some: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                return PaddedRows(self, [whole_row(tokens_S) for tokens_S in some]).response_log_probs()

            try:
                with evaluation_mode(self.model):
                    check_positions(self.model, logits, run, tokens_S)
            finally:
                self.temperature = temperature
        _in_place.add(self.model)

    def _distinct(self, rows: Sequence[torch.Tensor]) -> list[int]:
        """Tokens of the rows, the first one's first; tokens 0 and 1 where there are not two."""
        found = [int(row[0]) for row in rows[:1]] + [token for row in rows for token in row.unique().tolist()]
        return list(dict.fromkeys([*found, 0, 1] if len(set(found)) < 2 else found))

    def _independent(self, rows: Sequence[Row]) -> bool:
        """Whether rows, the longest first, are the same together as alone. A model is asked again when a row is longer than any
        before. A collective of the ranks, which ask together."""
        longest = max((len(row.tokens) for row in rows), default=0) if len(rows) > 1 else 0
        longest = int(self._most(longest))
        if not longest:
            return True  # no rank has two rows
        known, finding = _findings.get(self.model, (0, None))
        if finding is None or (longest > known and finding.holds):
            finding = self.fitting(lambda: self._probe(rows, longest))
            finding = replace(finding, difference=self._most(finding.difference))
            _findings[self.model] = longest, finding
            if not finding.holds:
                logger.warning("%s: responses go through the model one at a time", finding)
        return finding.holds

    def _probe(self, rows: Sequence[Row], longest: int) -> Finding:
        tokens_S = torch.cat([torch.zeros(1, dtype=torch.int64, device=self.device), *(row.tokens for row in rows)])
        together = probe_rows(tokens_S, longest=longest, rows=self.sequences_together(longest))

        def run(some: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return PaddedRows(self, [whole_row(tokens_S.to(self.device)) for tokens_S in some]).response_log_probs()

        return probe(self.model, run, together)

    def _most(self, value: float) -> float:
        """The largest of all ranks'."""
        if self.rounds.group is None:
            return value
        most = torch.tensor(float(value), device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.rounds.group)
        return float(most)

    def _logits(
        self, tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
    ) -> tuple[torch.Tensor, Cache | None]:
        """Logits (N, K, V) at the columns ``kept_K``, and the cache of the forward; ``cache`` holds the tokens before."""
        cached = cache.get_seq_length() if cache is not None else 0
        attention_mask = tokens_NS.new_ones(tokens_NS.shape[0], cached + tokens_NS.shape[1])
        keep = {"logits_to_keep": kept_K} if accepts_logits_to_keep(self.model) else {}
        past = {"past_key_values": cache} if cache is not None else {}
        caches = keeps_keys_and_values(self.model)
        output = self.model(input_ids=tokens_NS, attention_mask=attention_mask, use_cache=caches, **past, **keep)
        return output.logits if keep else output.logits[:, kept_K], output.get("past_key_values")

    def _dummy(self) -> Row:
        return whole_row(torch.zeros(2, dtype=torch.int64, device=self.device))


class PaddedRows(MicroBatch):
    """Rows padded on the right. Forwards end at the last position that a caller asks for."""

    def __init__(self, model: HuggingFaceModel, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._host, self._model = model, model.model
        self._tokens_BS = pad_sequence([row.tokens for row in rows], batch_first=True)
        self._lengths = [len(row.tokens) for row in rows]
        """Positions of each row that the latest forward was for."""

    def leaf(self, name: str) -> nn.Module:
        return leaf_module(self._model, name)

    def logits(self, positions: Sequence[Range]) -> torch.Tensor:
        head, at = self._model.get_output_embeddings(), self._targets(positions, ahead=0)
        if head is None:
            return self._forward(positions).logits[at.batch_row_K, at.column_K]
        with keep_positions(head, at):
            return self._forward(positions).logits[0]

    def log_likelihood(self, tokens: Sequence[Range]) -> torch.Tensor:
        targets, before = self._targets(tokens), [(first - 1, past - 1) for first, past in tokens]
        if len(targets.tokens_K) > CHUNK_POSITIONS and self._works_in_chunks():
            with sum_log_probs(self._model.get_output_embeddings(), targets, self._host.temperature):
                return read_sum(self._forward(before).logits)
        return -negative_log_likelihood(self.logits(before), targets.tokens_K, self._host.temperature)

    def response_log_probs(self) -> list[torch.Tensor]:
        return [of_row[OLD_LOG_PROBS] for of_row in self.statistics(entropy=False)]

    def hidden_states(self) -> list[torch.Tensor]:
        with capture_hidden_states(self._model.get_output_embeddings()) as captured:
            self._forward([(0, len(row.tokens)) for row in self.rows])
        of_rows = zip(self.rows, self.per_row(captured[0]), strict=True)
        return [of_row[row.start :].clone() for row, of_row in of_rows]  # without the rest

    def at(self, row: int, position: int) -> tuple[int, int]:
        return row, position

    def per_row(self, values_BS: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`MicroBatch`; also with further dimensions after S."""
        return [of_row[:length] for of_row, length in zip(values_BS, self._lengths, strict=True)]

    def statistics(self, *, entropy: bool) -> list[dict[str, torch.Tensor]]:
        """One forward, without gradients. For each row the log-probability and, where asked for, the entropy of its response
        tokens, (T,) float32."""
        tokens = [(row.start, len(row.tokens)) for row in self.rows]
        targets, before = self._targets(tokens), [(first - 1, past - 1) for first, past in tokens]
        temperature = self._host.temperature
        if self._works_in_chunks():
            head = self._model.get_output_embeddings()
            with capture_log_probs(head, targets, temperature, entropy=entropy) as captured:
                self._forward(before)
            values = captured[0]
        else:
            values = log_probs_and_entropy(self.logits(before), targets.tokens_K, temperature, entropy=entropy)
        counts = [past - first for first, past in tokens]
        log_probs_K, entropy_K = values
        named = {OLD_LOG_PROBS: log_probs_K.split(counts)}
        if entropy_K is not None:
            named[ENTROPY] = entropy_K.split(counts)
        return [dict(zip(named, of_row, strict=True)) for of_row in zip(*named.values(), strict=True)]

    def _works_in_chunks(self) -> bool:
        head = self._model.get_output_embeddings()
        return head is not None and works_in_chunks(head) and has_plain_logits(self._model)

    def _targets(self, ranges: Sequence[Range], *, ahead: int = 1) -> Targets:
        """The tokens of a range of each row, and the positions that are ``ahead`` of them."""
        device = self._tokens_BS.device
        counts = torch.tensor([past - first for first, past in ranges])
        batch_row_K = torch.repeat_interleave(torch.arange(len(self.rows)), counts).to(device)
        position_K = torch.cat([torch.arange(first, past) for first, past in ranges]).to(device)
        return Targets(self._tokens_BS[batch_row_K, position_K], batch_row_K, position_K - ahead)

    def _forward(self, positions: Sequence[Range]) -> Any:
        """Up to the last of the positions of each row."""
        self._lengths = [past for _, past in positions]
        tokens_BS = self._tokens_BS[:, : max(1, *self._lengths)]
        return self._model(input_ids=tokens_BS, attention_mask=torch.ones_like(tokens_BS), use_cache=False)


def check_no_virtual_tokens(model: nn.Module) -> None:
    """Refuse a model with virtual tokens of peft's: prompt tuning, P-tuning and its kind put them in front of the tokens, whose
    logits they shift, and prefix tuning in front of the keys and values that a pass reuses.

    Raises:
        ValueError: with the remedy.
    """
    for module in model.modules():
        config = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the model has virtual tokens ({type(config).__name__}), beside which log-probabilities and scores would be "
                "those of other positions; use an adapter without, such as LoRA or IA3"
            )


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


@cache
def _warn_of_memory() -> None:
    logger.warning(
        "memory ran out in a pass: fewer responses go through the model together from here on; set tokens lower to spare the "
        "attempts"
    )
