"""verl's FSDP engine as a host of methods. Inputs, micro-batches, packing, sequence parallelism, autocast and offload
are those of verl's ``FSDPEngineWithLMHead.forward_step``, so that a method sees the model as the training step does.
Backwards go to a leaf activation and stop there: no parameter gets a gradient.

Under Ulysses sequence parallelism each rank of the group holds a slice of the packed responses. It differentiates the
targets in its own slice; the attention's all-to-all carries every rank's share to every slice, and the values are
gathered.

Shape suffixes: R responses, K chosen positions, S positions, D hidden, V vocabulary, N sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import Module
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from grail_advantage.data import Row
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
from grail_advantage.model.probe import Finding, probe, probe_rows, whole_row
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE, nested
from grail_advantage.verl_ext.patches import autocast, gather_packed

PROBED_TOKENS = 40  # of a response by which packing is checked
_packs: WeakSet[Module] = WeakSet()  # models whose packed responses do not see each other


class EngineModel:
    """The policy in verl's engine, which is in evaluation mode, as :class:`grail_advantage.model.interface.Model`.
    Every method is a collective of the data-parallel group, and every rank of a sequence-parallel group calls it with
    the same responses."""

    def __init__(
        self,
        engine: FSDPEngineWithLMHead,
        *,
        temperature: float,
        step: int = 0,
        pad_token: int | None = None,
    ) -> None:
        self.engine = engine
        self.temperature = temperature
        self.step = step
        self.pad_token = pad_token
        device = torch.device(get_device_id())
        self.rounds = RankRounds(engine.get_data_parallel_group(), device)

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[MicroBatch], Sequence[T]], *, gradients: bool
    ) -> list[T]:
        """Split as the actor update's, or without gradients as those of the old log-probabilities. With
        ``enable_activation_offload`` verl switches the blocks' own checkpointing off, and offloads, or checkpoints in
        its own way, in training mode alone (``verl.utils.activation_offload``); blocks are checkpointed here then."""
        offloads = self.engine.model_config.enable_activation_offload
        with (
            hooks.evaluation_mode(self.engine.module, checkpoint_blocks=offloads)
            if gradients
            else torch.no_grad()
        ):
            return self._run(rows, work, gradients=gradients)

    def probe(self, layout: str, longest: int) -> Finding:
        """Whether responses of at most ``longest`` tokens, drawn from all of the vocabulary, are the same beside others
        (:mod:`grail_advantage.model.probe`), in micro-batches of a layout of :mod:`grail_advantage.verl_ext.exchange`.
        """
        engine = self.engine
        training = layout == UPDATE
        budget, count = _micro_batch_size(engine, gradients=training)
        packed = engine.engine_config.use_remove_padding and layout != PADDED_FORWARD
        by_tokens = engine.engine_config.use_dynamic_bsz
        slices = engine.ulysses_sequence_parallel_size
        # A budget is of one rank, and the ranks of a sequence-parallel group share a row.
        size = {"budget": budget * slices} if by_tokens else {"rows": count}

        def run(responses: Sequence[Tensor]) -> list[Tensor]:
            rows = list(map(whole_row, responses))
            work = EngineMicroBatch.response_log_probs
            return self._run(rows, work, gradients=training, packed=packed)

        vocabulary = engine.model_config.hf_config.get_text_config().vocab_size
        tokens_S = torch.arange(0, vocabulary, max(1, vocabulary // 1000), device="cpu")
        # The update runs in training mode, with its dropout; a forward for log-probabilities does not.
        engine.module.train(training)
        return probe(engine.module, run, probe_rows(tokens_S, longest=longest, **size))

    def check_packing(self) -> None:
        """ValueError, with the remedy, for a model whose packed responses see each other; it is asked once."""
        if not self.engine.engine_config.use_remove_padding or self.engine.module in _packs:
            return
        finding = self.probe(FORWARD, PROBED_TOKENS)
        # Padded responses that differ as well are no fault of packing.
        if not finding.holds and self.probe(PADDED_FORWARD, PROBED_TOKENS).holds:
            raise ValueError(
                "actor_rollout_ref.model.use_remove_padding=True does not work with this model: packed responses see "
                f"each other ({finding}); set it to false, or use a method without a pass"
            )
        _packs.add(self.engine.module)

    def _run(
        self,
        rows: Sequence[Row],
        work: Callable[[EngineMicroBatch], Sequence[T]],
        *,
        gradients: bool,
        packed: bool | None = None,
    ) -> list[T]:
        """Split this rank's rows, as many on every rank, by the token budget or the number of responses of the actor
        update's micro-batches, or without gradients of those of the old log-probabilities; as many on every rank. ``packed``:
        as the engine does, unless it is said."""
        settings = self.engine.engine_config
        budget, count = _micro_batch_size(self.engine, gradients=gradients)
        slices = self.engine.ulysses_sequence_parallel_size
        # On the CPU, as verl cuts micro-batches; each then goes to the device as a whole.
        tokens = [row.tokens.cpu() for row in rows]
        if settings.use_dynamic_bsz:
            # A response that a method made longer than any rollout goes alone; the ranks must agree on what is long.
            longest = int(self.rounds.most(max(map(len, tokens))))
            # verl multiplies the budget by the group's ranks: of 100 tokens on 4 of them each has 25.
            budget = max(budget, -(-longest // slices))
        inputs = tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(len(ids), device="cpu") for ids in tokens]),
            },
            non_tensor_dict={
                "temperature": self.temperature,
                "use_remove_padding": settings.use_remove_padding if packed is None else packed,
                "use_fused_kernels": settings.use_fused_kernels,
                "use_dynamic_bsz": settings.use_dynamic_bsz,
                "max_token_len_per_gpu": budget,
                "sp_size": slices,
            },
        )
        if settings.use_dynamic_bsz:
            batches, parts = prepare_micro_batches(inputs, dp_group=self.rounds.group)
        else:
            parts = [part.tolist() for part in torch.arange(len(rows), device="cpu").split(count)]
            batches = [tu.index_select_tensor_dict(inputs, part) for part in parts]
        results: dict[int, T] = {}
        for batch, indices in zip(batches, parts, strict=True):
            batch = batch.to(get_device_id())
            pairs = zip(indices, batch["input_ids"].unbind(), strict=True)
            micro_rows = [replace(rows[index], tokens=ids) for index, ids in pairs]
            micro = EngineMicroBatch(self.engine, batch, micro_rows)
            results.update(zip(indices, work(micro), strict=True))
        return [results[index] for index in range(len(rows))]

    def sequences(self) -> AbstractContextManager[Forward]:
        return sequence_forward(self.engine.module, self.rounds, partial(autocast, self.engine))

    def sequences_together(self, length: int) -> int:
        """By the token budget of the actor update's micro-batches, or their number of responses."""
        budget, count = _micro_batch_size(self.engine, gradients=True)
        # One that is longer than the budget goes alone.
        return max(1, budget // length) if self.engine.engine_config.use_dynamic_bsz else count


def _micro_batch_size(engine: FSDPEngineWithLMHead, *, gradients: bool) -> tuple[int, int]:
    """The token budget, and the number of responses, of a micro-batch."""
    settings = engine.engine_config
    kind = "" if gradients else "infer_"
    names = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
    budget, count = (
        getattr(settings, f"{kind}{name}") or getattr(settings, name) for name in names
    )
    return budget, count


class EngineMicroBatch(MicroBatch):
    """Responses side by side, padded, or packed into one long row, as
    :class:`grail_advantage.model.interface.MicroBatch`. Every forward is a collective of the engine's ranks.
    ``batch`` has the responses for the engine, which is in evaluation mode, ``rows`` for the method."""

    def __init__(
        self, engine: FSDPEngineWithLMHead, batch: TensorDict, rows: Sequence[Row]
    ) -> None:
        self.engine = engine
        self.module = engine.module
        self.batch = batch
        self.rows = rows
        self.packed = engine.engine_config.use_remove_padding
        self.offsets_R = batch["input_ids"].offsets()
        self._model_inputs, self._output_args = engine.prepare_model_inputs(batch)

    def logits(self, positions: Sequence[Range]) -> Tensor:
        """Not under sequence parallelism and not with fused kernels."""
        with autocast(self.engine):
            return self._logits_at(*self._columns(*places_of(positions, self.offsets_R.device)))

    def log_likelihood(self, tokens: Sequence[Range]) -> Tensor:
        tokens_K, batch_row_K, column_K = self._find_targets(tokens)
        with autocast(self.engine):
            if self.engine.engine_config.use_fused_kernels:
                # verl's fused forward gives every next token's log-probability instead of logits.
                return self._forward().log_probs[batch_row_K, column_K].float().sum()
            count = len(tokens_K)
            # At least one, so that there always is a graph for the backward.
            if not count:
                batch_row_K = column_K = column_K.new_zeros(1)
            logits_KV = self._logits_at(batch_row_K, column_K)[:count]
            return hooks.log_probs(logits_KV, tokens_K, tu.get(self.batch, "temperature")).sum()

    def _logits_at(self, row_K: Tensor, column_K: Tensor) -> Tensor:
        # (B, S, D) becomes (1, K, D) in front of the head, so that logits are (1, K, V) and not (B, S, V).
        with hooks.at_head(self.module, lambda hidden_BSD: hidden_BSD[row_K, column_K][None]):
            return self._forward().logits[0]

    def response_log_probs(self) -> list[Tensor]:
        """By verl's own code."""
        with autocast(self.engine):
            outputs = self.engine.prepare_model_outputs(
                self._forward(), self._output_args, self.batch, logits_processor_func=None
            )
        rows = zip(self.rows, outputs["log_probs"].unbind(), strict=True)
        # A response from token 3 of 5 on is predicted at positions 2 and 3.
        return [values_S[row.start - 1 : len(row.tokens) - 1].float() for row, values_S in rows]

    def forward(self) -> None:
        with autocast(self.engine):
            self._forward()

    def at(self, row: int, position: int) -> tuple[int, int]:
        if not self.packed:
            return row, position
        return 0, int(self.offsets_R[row]) + position

    def per_row(self, values_BS: Tensor) -> list[Tensor]:
        lengths = self.offsets_R.diff().tolist()
        if self.packed:
            values_N = gather_packed(self.engine, values_BS[0], self._output_args["pad_size"])
            return list(values_N.split(lengths))
        return [values_S[:length] for values_S, length in zip(values_BS, lengths, strict=True)]

    def _forward(self) -> Any:
        return self.module(**self._model_inputs, use_cache=False)

    def _columns(self, row_K: Tensor, position_K: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and columns of positions: a packed micro-batch is one long row, a padded one keeps responses apart."""
        if not self.packed:
            return row_K, position_K
        # Of responses of 5 and 4 tokens, position 1 of the second is column 6.
        return torch.zeros_like(row_K), position_K + self.offsets_R[row_K]

    def _find_targets(self, tokens: Sequence[Range]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens whose predictors are in this rank's slice, and the predictors' rows and columns there; int64, (K,)."""
        row_K, position_K = places_of(tokens, self.offsets_R.device)
        tokens_K = self.batch["input_ids"].values()[self.offsets_R[row_K] + position_K]
        batch_row_K, column_K = self._columns(row_K, position_K - 1)
        if self.engine.use_ulysses_sp:
            # Of a row of 12 columns on 3 ranks, rank 1 holds columns 4 to 7, as its 0 to 3.
            width = self._model_inputs["input_ids"].shape[1]
            column_K = column_K - get_ulysses_sequence_parallel_rank() * width
            here_K = (column_K >= 0) & (column_K < width)
            tokens_K = tokens_K[here_K]
            batch_row_K = batch_row_K[here_K]
            column_K = column_K[here_K]
        return tokens_K, batch_row_K, column_K
