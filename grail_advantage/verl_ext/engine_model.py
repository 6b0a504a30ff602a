"""verl's FSDP engine as a host of signals.

Inputs, micro-batches, packing, sequence parallelism, autocast and offload are those of verl's
``FSDPEngineWithLMHead.forward_step``, so that a signal sees the model exactly as the training step does. Backwards go to a leaf
activation and stop there: no parameter gets a gradient, and the next optimiser step is what it would have been without.

Under Ulysses sequence parallelism each rank of the group holds a slice of the packed responses. It differentiates the targets
in its own slice; the attention's all-to-all carries every rank's share to every slice, and the values are gathered.

Shape suffixes: R responses, K chosen positions, S positions, D hidden, V vocabulary, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm
from transformers import Cache
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from grail_advantage.data import Row
from grail_advantage.model.activations import (
    CHUNK_POSITIONS,
    Targets,
    capture_hidden_states,
    evaluation_mode,
    keep_logits,
    keeps_keys_and_values,
    leaf_module,
    negative_log_likelihood,
    read_sum,
    sum_log_probs,
    works_in_chunks,
)
from grail_advantage.model.architecture import has_plain_logits
from grail_advantage.model.interface import Forward, MicroBatch, Model, Range, RankRounds
from grail_advantage.model.probe import Finding, probe, probe_rows, whole_row
from grail_advantage.verl_ext.exchange import PADDED_FORWARD, UPDATE, nested
from grail_advantage.verl_ext.patches import autocast, gather_packed, without_activation_offload

PROGRESS_SECONDS = 10
"""A pass that shows its progress does so when it takes longer than this, and again after each such time."""

_T = TypeVar("_T")


class EngineModel(Model):
    """The policy in verl's engine, which is in evaluation mode. Every method is a collective of the data-parallel group, and
    every rank of a sequence-parallel group calls it with the same responses."""

    def __init__(
        self, engine: FSDPEngineWithLMHead, *, temperature: float, step: int = 0, pad_token: int | None = None
    ) -> None:
        self.engine = engine
        self.temperature = temperature
        self.step = step
        self.pad_token = pad_token

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[MicroBatch], Sequence[_T]], *, gradients: bool
    ) -> list[_T]:
        """See :class:`Model`; split as the actor update's, or without gradients as those of the old log-probabilities."""
        results: list[Any] = [None] * len(rows)
        with gradient_mode(self.engine) if gradients else torch.no_grad():
            for micro, indices in self._split(rows, gradients=gradients):
                for index, result in zip(indices, work(micro), strict=True):
                    results[index] = result
        return results

    def probe(self, layout: str, tokens_S: torch.Tensor, longest: int) -> Finding:
        """Whether responses are the same beside others (:mod:`grail_advantage.model.probe`).

        Args:
            layout: ``UPDATE``: the micro-batches of the actor update, in training mode; ``FORWARD``: those of the old
                log-probabilities; ``PADDED_FORWARD``: likewise, padded where the run packs.
            tokens_S: to draw from; the same on every rank.
            longest: tokens of prompt and response, the most that there can be.
        """
        engine, settings, training = self.engine, self.engine.engine_config, layout == UPDATE
        budget, count = micro_batch_size(engine, gradients=training)
        packed = settings.use_remove_padding and layout != PADDED_FORWARD
        size = (
            {"budget": budget * engine.ulysses_sequence_parallel_size} if settings.use_dynamic_bsz else {"rows": count}
        )
        rows = probe_rows(tokens_S, longest=longest, **size)

        def run(some: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            whole = [whole_row(tokens_S) for tokens_S in some]
            found: dict[int, torch.Tensor] = {}
            for micro, indices in self._split(whole, gradients=training, packed=packed):
                found |= zip(indices, micro.response_log_probs(), strict=True)
            return [found[index] for index in range(len(some))]

        with without_activation_offload(engine.module):
            engine.module.train(training)
            return probe(engine.module, run, rows)

    def _split(
        self, rows: Sequence[Row], *, gradients: bool, packed: bool | None = None
    ) -> Iterator[tuple[EngineMicroBatch, list[int]]]:
        """The micro-batches of :func:`training_micro_batches`, with the indices of their rows."""
        for batch, indices in training_micro_batches(
            self.engine, self._inputs(rows), gradients=gradients, packed=packed
        ):
            batch = batch.to(get_device_id())
            tokens = batch["input_ids"].unbind()
            here = [replace(rows[index], tokens=of_row) for index, of_row in zip(indices, tokens, strict=True)]
            yield EngineMicroBatch(self.engine, batch, here), indices

    @contextmanager
    def sequences(self) -> Iterator[Forward]:
        """See :class:`Model`. Sharded parameters are gathered in every forward, so a rank that is through runs forwards of one
        token until all are."""
        engine = self.engine
        rounds = RankRounds(engine.get_data_parallel_group(), torch.device(get_device_name()))

        def run(
            tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
        ) -> tuple[torch.Tensor, Cache | None]:
            cached = cache.get_seq_length() if cache is not None else 0
            length = cached + tokens_NS.shape[1]
            with keep_logits(engine.module.get_output_embeddings(), kept_K), autocast(engine):
                output = engine.module(
                    input_ids=tokens_NS,
                    attention_mask=tokens_NS.new_ones(len(tokens_NS), length),
                    position_ids=torch.arange(cached, length, device=tokens_NS.device).expand(len(tokens_NS), -1),
                    past_key_values=cache,
                    use_cache=keeps_keys_and_values(engine.module),
                )
            return output.logits, output.get("past_key_values")

        def forward(
            tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
        ) -> tuple[torch.Tensor, Cache | None]:
            rounds.take()
            return run(tokens_NS.to(get_device_id()), kept_K.to(get_device_id()), cache)

        with torch.no_grad():
            yield forward
            nothing_11 = torch.zeros((1, 1), dtype=torch.int64, device=get_device_id())
            for _ in rounds.wait():
                run(nothing_11, nothing_11[0], None)

    def sequences_together(self, length: int) -> int:
        """See :class:`Model`; the token budget of the actor update's micro-batches, or their number of responses."""
        settings = self.engine.engine_config
        if settings.use_dynamic_bsz:
            return max(1, settings.max_token_len_per_gpu // length)
        return settings.micro_batch_size_per_gpu

    def progress(self, total: int, what: str) -> tqdm:
        """See :class:`Model`; of the first rank."""
        return tqdm(
            total=total,
            desc=f"{what}, rank 0",
            disable=torch.distributed.get_rank() != 0,
            mininterval=PROGRESS_SECONDS,
            delay=PROGRESS_SECONDS,
        )

    def _inputs(self, rows: Sequence[Row]) -> TensorDict:
        # On the CPU, as verl cuts micro-batches; each then goes to the device as a whole.
        tokens = [row.tokens.cpu() for row in rows]
        positions = [torch.arange(len(of_row)) for of_row in tokens]
        fields = {"input_ids": nested(tokens), "position_ids": nested(positions)}
        return tu.get_tensordict(fields, non_tensor_dict={"temperature": self.temperature})


def gradient_mode(engine: FSDPEngineWithLMHead) -> AbstractContextManager[None]:
    """:func:`grail_advantage.model.activations.evaluation_mode` of the engine's model.

    With ``enable_activation_offload`` verl switches the blocks' own checkpointing off, and offloads, or checkpoints in its own
    way, in training mode alone (``verl.utils.activation_offload``). Blocks are checkpointed here then.
    """
    return evaluation_mode(engine.module, checkpoint_blocks=engine.model_config.enable_activation_offload)


def micro_batch_size(engine: FSDPEngineWithLMHead, *, gradients: bool) -> tuple[int, int]:
    """The token budget, and the number of responses, of a micro-batch of the actor update, or without gradients of the old
    log-probabilities."""
    settings = engine.engine_config
    budget, count = settings.max_token_len_per_gpu, settings.micro_batch_size_per_gpu
    if gradients:
        return budget, count
    return settings.infer_max_token_len_per_gpu or budget, settings.infer_micro_batch_size_per_gpu or count


def training_micro_batches(
    engine: FSDPEngineWithLMHead, rows: TensorDict, *, gradients: bool = True, packed: bool | None = None
) -> list[tuple[TensorDict, list[int]]]:
    """Split by the token budget or the number of responses of the actor update's micro-batches, or without gradients of those
    of the old log-probabilities; as many on every rank.

    Args:
        engine: verl's FSDP engine.
        rows: this rank's; as many on every rank.
        gradients: see above.
        packed: ``None``: as the engine does.

    Returns:
        the micro-batches, each with the indices of its responses.
    """
    settings = engine.engine_config
    budget, count = micro_batch_size(engine, gradients=gradients)
    if settings.use_dynamic_bsz:
        # A response that a signal made longer than any rollout goes alone; the ranks must agree on what is long.
        longest = rows["input_ids"].offsets().diff().max().to(get_device_name())
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
        budget = max(budget, -(-int(longest) // engine.ulysses_sequence_parallel_size))
    rows = rows.copy()
    tu.assign_non_tensor(
        rows,
        use_remove_padding=settings.use_remove_padding if packed is None else packed,
        use_fused_kernels=settings.use_fused_kernels,
        use_dynamic_bsz=settings.use_dynamic_bsz,
        max_token_len_per_gpu=budget,
        sp_size=engine.ulysses_sequence_parallel_size,
    )
    if settings.use_dynamic_bsz:
        micro_batches, indices = prepare_micro_batches(rows, dp_group=engine.get_data_parallel_group())
        return list(zip(micro_batches, indices, strict=True))
    indices = torch.arange(len(rows)).split(count)
    return [(tu.index_select_tensor_dict(rows, index), index.tolist()) for index in indices]


class EngineMicroBatch(MicroBatch):
    """Responses side by side, padded, or packed into one long row. Every forward is a collective of the engine's ranks."""

    def __init__(
        self,
        engine: FSDPEngineWithLMHead,
        batch: TensorDict,
        rows: Sequence[Row],
        *,
        with_log_probs: bool = False,
    ) -> None:
        """
        Args:
            engine: in evaluation mode.
            batch: the responses for the engine, on its device.
            rows: the responses for the signal, likewise.
            with_log_probs: let :meth:`log_likelihood` also compute the outputs of verl's own forward; see :attr:`outputs`.
        """
        self.engine = engine
        self.batch = batch
        self.rows = rows
        self.with_log_probs = with_log_probs
        self.outputs: dict[str, Sequence[torch.Tensor]] = {}
        """verl's model outputs (``log_probs``, ``entropy``, ...), a tensor a response."""
        self.packed = engine.engine_config.use_remove_padding
        self.offsets_R = batch["input_ids"].offsets()
        self._starts = self.offsets_R.tolist()
        self._model_inputs, self._output_args = engine.prepare_model_inputs(batch)

    def leaf(self, name: str) -> nn.Module:
        return leaf_module(self.engine.module, name)

    def logits(self, positions: Sequence[Range]) -> torch.Tensor:
        """See :class:`MicroBatch`; not under sequence parallelism and not with fused kernels."""
        places = [(*self.at(row, start), stop - start) for row, (start, stop) in enumerate(positions)]
        device = self.offsets_R.device
        batch_row_K = torch.cat([torch.full((count,), batch_row) for batch_row, _, count in places]).to(device)
        column_K = torch.cat([torch.arange(first, first + count) for _, first, count in places]).to(device)
        columns, kept_K = column_K.unique(return_inverse=True)
        with keep_logits(self.engine.module.get_output_embeddings(), columns), autocast(self.engine):
            kept_logits = self._forward().logits
        return kept_logits[batch_row_K, kept_K]

    def log_likelihood(self, tokens: Sequence[Range]) -> torch.Tensor:
        engine = self.engine
        targets = self._find_targets(tokens)
        for_verl: Any = None
        with autocast(engine):
            if engine.engine_config.use_fused_kernels:
                # verl's fused forward gives every next token's log-probability instead of logits.
                for_verl = self._forward()
                log_likelihood = for_verl.log_probs[targets.batch_row_K, targets.column_K].float().sum()
            else:
                log_likelihood, everywhere = self._from_logits(targets)
                for_verl = SimpleNamespace(logits=everywhere)
            if self.with_log_probs:
                with torch.no_grad():
                    self.outputs = self._verl_outputs(for_verl)
        return log_likelihood

    def _from_logits(self, targets: Targets) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The targets' log-likelihood and, where asked for, all logits, which verl scales in place where it may, so that
        nothing else may read them."""
        engine = self.engine
        head = engine.module.get_output_embeddings()
        temperature = tu.get_non_tensor_data(self.batch, "temperature", default=None)
        columns, kept_K = targets.column_K.unique(return_inverse=True)
        batch_rows = 1 if self.packed else len(self._starts) - 1
        many = batch_rows * len(columns) > CHUNK_POSITIONS
        if many and works_in_chunks(head) and has_plain_logits(engine.module):
            with sum_log_probs(head, targets, temperature, with_all=self.with_log_probs) as all_logits:
                log_likelihood = read_sum(self._forward().logits)
            return log_likelihood, all_logits[0] if self.with_log_probs else None
        if not len(columns):
            columns = columns.new_zeros(1)  # at least one, so that there always is a graph for the backward
        with keep_logits(head, columns, with_all=self.with_log_probs) as heads:
            kept_logits = self._forward().logits
        if self.with_log_probs:
            _check_untouched(kept_logits, heads[0].kept)
        logits_KV = kept_logits[targets.batch_row_K, kept_K]
        log_likelihood = -negative_log_likelihood(logits_KV, targets.tokens_K, temperature)
        return log_likelihood, heads[0].everywhere if self.with_log_probs else None

    def response_log_probs(self) -> list[torch.Tensor]:
        """See :class:`MicroBatch`; by verl's own code."""
        with autocast(self.engine):
            log_probs = self._verl_outputs(self._forward())["log_probs"]
        return [
            of_row[row.start - 1 : len(row.tokens) - 1].float()
            for row, of_row in zip(self.rows, log_probs, strict=True)
        ]

    def hidden_states(self) -> list[torch.Tensor]:
        """See :class:`MicroBatch`; not with fused kernels."""
        with capture_hidden_states(self.engine.module.get_output_embeddings()) as captured, autocast(self.engine):
            self._forward()
        of_rows = self.per_row(captured[0])
        return [of_row[row.start :] for row, of_row in zip(self.rows, of_rows, strict=True)]

    def at(self, row: int, position: int) -> tuple[int, int]:
        return (0, self._starts[row] + position) if self.packed else (row, position)

    def per_row(self, values_BS: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`MicroBatch`; also with further dimensions after S."""
        lengths = self.offsets_R.diff().tolist()
        if self.packed:
            whole = gather_packed(self.engine, values_BS[0], self._output_args["pad_size"])
            return list(whole.split(lengths))
        return [of_row[:length] for of_row, length in zip(values_BS, lengths, strict=True)]

    def _forward(self) -> Any:
        return self.engine.module(**self._model_inputs, use_cache=False)

    def _verl_outputs(self, raw: Any) -> dict[str, Sequence[torch.Tensor]]:
        outputs = self.engine.prepare_model_outputs(raw, self._output_args, self.batch, logits_processor_func=None)
        return {name: values.unbind() for name, values in outputs.items()}

    def _find_targets(self, tokens: Sequence[Range]) -> Targets:
        """Those whose predictors are in this rank's slice; packed responses are one long row."""
        offsets = self.offsets_R
        start_R, end_R = torch.tensor(tokens, device=offsets.device).unbind(dim=1)
        counts_R = end_R - start_R
        row_K = torch.repeat_interleave(torch.arange(len(counts_R), device=offsets.device), counts_R)
        rank_K = torch.arange(len(row_K), device=offsets.device) - (counts_R.cumsum(0) - counts_R)[row_K]
        position_K = start_R[row_K] + rank_K
        tokens_K = self.batch["input_ids"].values()[offsets[row_K] + position_K]
        # A packed micro-batch is one long row; a padded one keeps its responses apart, each starting at column 0.
        batch_row_K = torch.zeros_like(row_K) if self.packed else row_K
        column_K = position_K - 1 + (offsets[row_K] if self.packed else 0)
        if self.engine.use_ulysses_sp:
            width = self._model_inputs["input_ids"].shape[1]
            column_K = column_K - get_ulysses_sequence_parallel_rank() * width
            here_K = (column_K >= 0) & (column_K < width)
            tokens_K, batch_row_K, column_K = tokens_K[here_K], batch_row_K[here_K], column_K[here_K]
        return Targets(tokens_K, batch_row_K, column_K)


def _check_untouched(logits: torch.Tensor, head_output: torch.Tensor) -> None:
    """verl's log-probabilities come from the output embeddings' own output, which must be the model's logits; NaN or not."""
    same = (logits == head_output) | (logits.isnan() & head_output.isnan())
    if not same.all():
        raise ValueError("this model changes its logits after the output embeddings")
