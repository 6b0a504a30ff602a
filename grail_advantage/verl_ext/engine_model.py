"""verl's FSDP engine as a host of methods. Inputs, micro-batches, packing, sequence parallelism, autocast and offload
are those of verl's ``FSDPEngineWithLMHead.forward_step``, so that a method sees the model as the training step does.
Backwards go to a leaf activation and stop there: no parameter gets a gradient.

Under Ulysses sequence parallelism each rank of the group holds a slice of the packed responses. It differentiates the
targets in its own slice; the attention's all-to-all carries every rank's share to every slice, and the values are
gathered.

Shape suffixes: R responses, K chosen positions, S positions, D hidden, V vocabulary, N sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
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
    places_of,
    sequence_forward,
)
from grail_advantage.model.probe import Finding, probe, probe_rows, whole_row
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE, nested
from grail_advantage.verl_ext.patches import autocast, gather_packed

PROBED_TOKENS = 40  # of a response by which packing is checked
_packs: WeakSet[nn.Module] = WeakSet()  # models whose packed responses do not see each other
_T = TypeVar("_T")


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

    def micro_batches(
        self, rows: Sequence[Row], work: Callable[[MicroBatch], Sequence[_T]], *, gradients: bool
    ) -> list[_T]:
        """Split as the actor update's, or without gradients as those of the old log-probabilities. With
        ``enable_activation_offload`` verl switches the blocks' own checkpointing off, and offloads, or checkpoints in
        its own way, in training mode alone (``verl.utils.activation_offload``); blocks are checkpointed here then."""
        results: list[Any] = [None] * len(rows)
        offloads = self.engine.model_config.enable_activation_offload
        with (
            hooks.evaluation_mode(self.engine.module, checkpoint_blocks=offloads)
            if gradients
            else torch.no_grad()
        ):
            for micro, indices in self._split(rows, gradients=gradients):
                for index, result in zip(indices, work(micro), strict=True):
                    results[index] = result
        return results

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

        def run(responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            log_probs: dict[int, torch.Tensor] = {}
            for micro, indices in self._split(
                list(map(whole_row, responses)), gradients=training, packed=packed
            ):
                log_probs |= zip(indices, micro.response_log_probs(), strict=True)
            return [log_probs[index] for index in range(len(responses))]

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

    def _split(
        self, rows: Sequence[Row], *, gradients: bool, packed: bool | None = None
    ) -> Iterator[tuple[EngineMicroBatch, list[int]]]:
        """The micro-batches of :func:`training_micro_batches`, with the indices of their rows."""
        # On the CPU, as verl cuts micro-batches; each then goes to the device as a whole.
        tokens = [row.tokens.cpu() for row in rows]
        fields = {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(ids), device="cpu") for ids in tokens]),
        }
        inputs = tu.get_tensordict(fields, non_tensor_dict={"temperature": self.temperature})
        for batch, indices in training_micro_batches(
            self.engine, inputs, gradients=gradients, packed=packed
        ):
            batch = batch.to(get_device_id())
            pairs = zip(indices, batch["input_ids"].unbind(), strict=True)
            micro_rows = [replace(rows[index], tokens=of_row) for index, of_row in pairs]
            yield EngineMicroBatch(self.engine, batch, micro_rows), indices

    def sequences(self) -> AbstractContextManager[Forward]:
        rounds = RankRounds(self.engine.get_data_parallel_group(), torch.device(get_device_id()))
        return sequence_forward(self.engine.module, rounds, lambda: autocast(self.engine))

    def sequences_together(self, length: int) -> int:
        """By the token budget of the actor update's micro-batches, or their number of responses."""
        budget, count = _micro_batch_size(self.engine, gradients=True)
        if not self.engine.engine_config.use_dynamic_bsz:
            return count
        return max(1, budget // length)  # one that is longer than the budget goes alone


def _micro_batch_size(engine: FSDPEngineWithLMHead, *, gradients: bool) -> tuple[int, int]:
    """The token budget, and the number of responses, of a micro-batch."""
    settings = engine.engine_config
    kind = "" if gradients else "infer_"
    names = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
    budget, count = (
        getattr(settings, f"{kind}{name}") or getattr(settings, name) for name in names
    )
    return budget, count


def training_micro_batches(
    engine: FSDPEngineWithLMHead,
    rows: TensorDict,
    *,
    gradients: bool = True,
    packed: bool | None = None,
) -> list[tuple[TensorDict, list[int]]]:
    """This rank's rows, as many on every rank, split by the token budget or the number of responses of the actor
    update's micro-batches, or without gradients of those of the old log-probabilities; as many on every rank, each with
    the indices of its responses. ``packed``: as the engine does, unless it is said."""
    settings = engine.engine_config
    budget, count = _micro_batch_size(engine, gradients=gradients)
    if settings.use_dynamic_bsz:
        # A response that a method made longer than any rollout goes alone; the ranks must agree on what is long.
        longest = rows["input_ids"].offsets().diff().max().to(get_device_name())
        torch.distributed.all_reduce(
            longest, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group()
        )
        # verl multiplies the budget by the group's ranks: of 100 tokens on 4 of them each has 25.
        budget = max(budget, -(-int(longest) // engine.ulysses_sequence_parallel_size))
    # The settings below are of these micro-batches, and not of the caller's batch.
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
        micro_batches, indices = prepare_micro_batches(
            rows, dp_group=engine.get_data_parallel_group()
        )
        return list(zip(micro_batches, indices, strict=True))
    indices = torch.arange(len(rows), device="cpu").split(count)
    return [(tu.index_select_tensor_dict(rows, index), index.tolist()) for index in indices]


class EngineMicroBatch:
    """Responses side by side, padded, or packed into one long row, as
    :class:`grail_advantage.model.interface.MicroBatch`. Every forward is a collective of the engine's ranks.
    ``batch`` has the responses for the engine, which is in evaluation mode, ``rows`` for the method."""

    def __init__(
        self, engine: FSDPEngineWithLMHead, batch: TensorDict, rows: Sequence[Row]
    ) -> None:
        self.engine = engine
        self.batch = batch
        self.rows = rows
        self.packed = engine.engine_config.use_remove_padding
        self.offsets_R = batch["input_ids"].offsets()
        self._model_inputs, self._output_args = engine.prepare_model_inputs(batch)

    def leaf(self, name: str) -> nn.Module:
        return hooks.leaf_module(self.engine.module, name)

    def logits(self, positions: Sequence[Range]) -> torch.Tensor:
        """Not under sequence parallelism and not with fused kernels."""
        with autocast(self.engine):
            return self._logits_at(*self._columns(*places_of(positions, self.offsets_R.device)))

    def log_likelihood(self, tokens: Sequence[Range]) -> torch.Tensor:
        tokens_K, batch_row_K, column_K = self._find_targets(tokens)
        with autocast(self.engine):
            if self.engine.engine_config.use_fused_kernels:
                # verl's fused forward gives every next token's log-probability instead of logits.
                return self._forward().log_probs[batch_row_K, column_K].float().sum()
            count = len(tokens_K)
            if not count:  # at least one, so that there always is a graph for the backward
                batch_row_K = column_K = column_K.new_zeros(1)
            logits_KV = self._logits_at(batch_row_K, column_K)[:count]
            temperature = tu.get_non_tensor_data(self.batch, "temperature", default=None)
            return hooks.log_probs(logits_KV, tokens_K, temperature).sum()

    def _logits_at(self, batch_row_K: torch.Tensor, column_K: torch.Tensor) -> torch.Tensor:
        # (B, S, D) becomes (1, K, D) in front of the head, so that logits are (1, K, V) and not (B, S, V).
        with hooks.at_head(
            self.engine.module, lambda hidden_BSD: hidden_BSD[batch_row_K, column_K][None]
        ):
            return self._forward().logits[0]

    def response_log_probs(self) -> list[torch.Tensor]:  # by verl's own code
        with autocast(self.engine):
            arguments = (self._forward(), self._output_args, self.batch)
            outputs = self.engine.prepare_model_outputs(*arguments, logits_processor_func=None)
        rows = zip(self.rows, outputs["log_probs"].unbind(), strict=True)
        # A response from token 3 of 5 on is predicted at positions 2 and 3.
        return [of_row[row.start - 1 : len(row.tokens) - 1].float() for row, of_row in rows]

    def hidden_states(self) -> list[torch.Tensor]:  # not with fused kernels
        with hooks.capture_hidden_states(self.engine.module) as captured, autocast(self.engine):
            self._forward()
        return [
            of_row[row.start :]
            for row, of_row in zip(self.rows, self.per_row(captured[0]), strict=True)
        ]

    def at(self, row: int, position: int) -> tuple[int, int]:
        if not self.packed:
            return row, position
        return 0, int(self.offsets_R[row]) + position

    # Also with further dimensions after S
    def per_row(self, values_BS: torch.Tensor) -> list[torch.Tensor]:
        lengths = self.offsets_R.diff().tolist()
        if self.packed:
            values_N = gather_packed(self.engine, values_BS[0], self._output_args["pad_size"])
            return list(values_N.split(lengths))
        return [of_row[:length] for of_row, length in zip(values_BS, lengths, strict=True)]

    def _forward(self) -> Any:
        return self.engine.module(**self._model_inputs, use_cache=False)

    def _columns(
        self, row_K: torch.Tensor, position_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns of positions: a packed micro-batch is one long row, a padded one keeps responses apart."""
        if not self.packed:
            return row_K, position_K
        # Of responses of 5 and 4 tokens, position 1 of the second is column 6.
        return torch.zeros_like(row_K), position_K + self.offsets_R[row_K]

    def _find_targets(
        self, tokens: Sequence[Range]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
