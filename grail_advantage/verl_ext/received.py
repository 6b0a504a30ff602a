"""What each token of an update receives (:mod:`grail_advantage.receipt`), read in verl's workers, put together in the trainer.

:class:`UpdateReader` runs in a worker, around the loss function that verl gives it: it reads the gradient of the tensor of
log-probabilities that goes into the loss, and changes nothing. :func:`watch_request` and :func:`receipt_of` run in the trainer.
Gradients are kept for the responses that the token dump writes. The loss's denominators, tokens and responses, are counted over
the whole optimiser step, or the check would divide wrongly.

Shape suffixes: R responses of a rank, B responses that are written, T response tokens, N packed tokens, U optimiser steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.data import OLD_LOG_PROBS
from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check, verl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.settings import ACTOR, Settings
from grail_advantage.verl_ext.step import UpdateBatch

# ----------------------------------------------------------------------------------------------------------- in the workers


@dataclass
class OptimiserStep:
    """One optimiser step on one rank."""

    places: list[int]
    """The place in the update's batch of each response of this step, the left-out ones included."""
    pieces: list[Piece]
    """The step's micro-batches, cut to the responses that the dump writes, by their slots; on the CPU."""


@dataclass
class _Reading:
    """A micro-batch before its backward."""

    gradient: Gradient
    places_R2: torch.Tensor
    prompts_R: torch.Tensor
    responses_R: torch.Tensor


class UpdateReader:
    """Reads, on one rank, what the responses of an update receive. An error in it stops no training: :meth:`take` raises it."""

    def __init__(self) -> None:
        self._number: Any = None
        self._steps: list[OptimiserStep] = []
        self._readings: list[_Reading] = []
        self._error: Exception | None = None

    @contextmanager
    def optimiser_step(self, worker: Any, data: TensorDict, places: Sequence[int]) -> Iterator[None]:
        """Within, the worker's loss function reads the log-probabilities of ``data`` too.

        Args:
            worker: verl's ``TrainingWorker``.
            data: its responses, with the field ``PLACES`` and the setting ``WATCHED``.
            places: of all responses of the optimiser step.
        """
        scale, loss_fn = 1.0, worker.loss_fn
        with self._attempt():
            number = tu.get_non_tensor_data(data, WATCHED, default=None)
            if number != self._number:
                self._number, self._steps, self._error = number, [], None
            scale = _loss_scale(worker.engine)
        worker.loss_fn = self._reading(loss_fn)
        try:
            yield
        finally:
            worker.loss_fn = loss_fn
            readings, self._readings = self._readings, []
        with self._attempt():
            self._steps.append(OptimiserStep(list(places), [_piece(reading, scale) for reading in readings]))

    def _reading(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        def read(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            with self._attempt():
                of_rows = (data[name].offsets().diff() for name in ("prompts", "responses"))
                self._readings.append(_Reading(Gradient(model_output["log_probs"]), data[PLACES], *of_rows))
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        return read

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def take(self, number: Any) -> list[OptimiserStep]:
        """The optimiser steps of the update with this number, which are forgotten here.

        Raises:
            Exception: one that came up while they were read.
        """
        known, steps, error = self._number, self._steps, self._error
        self._number, self._steps, self._error = None, [], None
        if error is not None:
            raise error
        if number != known:
            raise RuntimeError(f"update {number} was not watched here; the last one was {known}")
        return steps


def _loss_scale(engine: FSDPEngineWithLMHead) -> float:
    """The factor of the gradients in float16."""
    scaler = getattr(engine, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def _piece(reading: _Reading, scale: float) -> Piece:
    # verl's log-probabilities are packed: those of prompt + response, each at the position before its token.
    log_probs_N = reading.gradient.log_probs.values().cpu()  # in its own type, which says how exact the gradient is
    gradient = reading.gradient.values
    gradient_N = torch.zeros_like(log_probs_N) if gradient is None else gradient.values().cpu() / scale
    slots, log_probs, gradients, outside, start = [], [log_probs_N[:0]], [gradient_N[:0]], [], 0
    lengths = zip(reading.prompts_R.tolist(), reading.responses_R.tolist(), strict=True)
    for (_, slot), (prompt, response) in zip(reading.places_R2.tolist(), lengths, strict=True):
        own = slice(start + prompt - 1, start + prompt + response - 1)
        end = start + prompt + response
        if slot >= 0:
            slots.append(slot)
            log_probs.append(log_probs_N[own])
            gradients.append(gradient_N[own])
            outside.append(float(torch.cat([gradient_N[start : own.start], gradient_N[own.stop : end]]).abs().max()))
        start = end
    log_probs_bT, gradient_bT = (
        pad_sequence(values, batch_first=True)[1:].clone() for values in (log_probs, gradients)
    )
    width = int(reading.responses_R.max())
    return Piece(
        torch.tensor(slots, dtype=torch.int64), log_probs_bT, gradient_bT, outside_b=torch.tensor(outside), width=width
    )


# ----------------------------------------------------------------------------------------------------------- in the trainer


def watch_request(batch: KVBatchMeta, keys: Sequence[str], written: Sequence[int], number: Any) -> None:
    """Have the workers watch the update of a batch.

    Args:
        batch: of the update; gets a field and a setting.
        keys: of all responses, in the order of their places.
        written: places of the written responses.
        number: tells updates apart.
    """
    slots = {place: slot for slot, place in enumerate(written)}
    places_B2 = torch.tensor([[place, slots.get(place, -1)] for place in range(len(keys))])
    fields = TensorDict({PLACES: places_B2}, batch_size=len(keys))
    tq.kv_batch_put(keys=list(keys), partition_id=batch.partition_id, fields=fields)
    if batch.fields is not None:
        batch.fields = [*batch.fields, PLACES]
    batch.extra_info[WATCHED] = number


def without_watch(batch: KVBatchMeta) -> None:
    """Drop the field and the setting from a batch."""
    batch.extra_info.pop(WATCHED, None)
    if batch.fields is not None:
        batch.fields = [name for name in batch.fields if name != PLACES]


def loss_of(settings: Settings) -> Loss:
    """The loss of a run's update, by its settings."""

    def actor(*names: str) -> dict[str, Any]:
        values = {name.rsplit(".", 1)[-1]: settings[f"{ACTOR}.{name}"] for name in names}
        return {name: value for name, value in values.items() if value is not None}

    kl = {}
    if settings[f"{ACTOR}.use_kl_loss"]:
        kl = {"kl": settings[f"{ACTOR}.kl_loss_type"], "kl_coef": settings[f"{ACTOR}.kl_loss_coef"]}
    return verl_loss(
        settings[f"{ACTOR}.policy_loss.loss_mode"] or "vanilla",
        settings[f"{ACTOR}.loss_agg_mode"],
        **actor("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_scale_factor"),
        **actor("tau_pos", "tau_neg", "policy_loss.tau_pos", "policy_loss.tau_neg", "policy_loss.dro_beta"),
        **actor("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
        **kl,
    )


@dataclass(frozen=True)
class Written:
    """The written responses of an update."""

    update: int
    """Number of the update in the step."""
    places: list[int]
    """Of the responses in the update's batch."""
    keys: list[str]
    advantages_BT: torch.Tensor
    """After weighting."""
    mask_BT: torch.Tensor

    def number(self, step: UpdateBatch) -> str:
        """Tells the update apart."""
        return f"{step.rollouts.step}.{self.update}"


def fetch_loss_columns(keys: Sequence[str], partition_id: str, width: int) -> dict[str, torch.Tensor]:
    """What the loss reads of some responses beside their advantages, as far as the run has it; each (B, ``width``)."""
    names = [OLD_LOG_PROBS, "rollout_is_weights", "ref_log_prob"]
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=names)
    known = {name: data[name].to_padded_tensor(0).float() for name in names if name in data.keys()}  # noqa: SIM118
    return {name: pad(values_BT, (0, width - values_BT.shape[1])) for name, values_BT in known.items()}


def receipt_of(
    written: Written,
    columns_BT: Mapping[str, torch.Tensor],
    of_ranks: Sequence[list[OptimiserStep]],
    *,
    sent: Sequence[int],
    tokens: Sequence[int],
    loss: Loss,
    epochs: int,
    on_policy: bool,
) -> Receipt:
    """The receipt of an update, over the written responses.

    Args:
        written: these.
        columns_BT: from :func:`fetch_loss_columns`.
        of_ranks: the optimiser steps of each data-parallel rank.
        sent: tokens of each response of the whole batch that went into the update; 0 for one that was left out.
        tokens: of each response of the whole batch, those that train.
        on_policy: whether the old log-probabilities are those of the policy before the update.
    """
    longest, updates = written.mask_BT.shape[1], len(of_ranks[0])
    places = [[place for steps in of_ranks for place in steps[update].places] for update in range(updates)]
    sent_B = torch.tensor(sent)[written.places]
    # A tail that is cut has advantages of 0; it takes part in nothing but the number of tokens.
    sent_BT = torch.arange(longest) < sent_B.unsqueeze(1)
    pieces = list(_pieces(of_ranks, longest))
    if loss.account == "kl_cov" and len(written.keys) < len(tokens):
        loss = replace(loss, account=None)  # which tokens it penalises follows from all responses of a micro-batch
    if not pieces:
        nothing_UBT = torch.full((updates, *written.mask_BT.shape), torch.nan)
        return Receipt(nothing_UBT[0], nothing_UBT[0], *[nothing_UBT] * 3, ())
    receipt = check(
        Batch(
            advantages_BT=written.advantages_BT,
            mask_BT=written.mask_BT & (sent_BT | (sent_B == 0).unsqueeze(1)),
            old_log_probs_BT=columns_BT.get(OLD_LOG_PROBS),
            weights_BT=columns_BT.get("rollout_is_weights"),
            ref_log_probs_BT=columns_BT.get("ref_log_prob"),
            left_out_B=sent_B == 0,
            updates=updates // epochs,
            epochs=epochs,
            ranks=len(of_ranks),
            on_policy=on_policy,
            keys=written.keys,
            totals_U2=torch.tensor([[sum(tokens[p] for p in of_step), len(of_step)] for of_step in places]),
        ),
        loss,
        pieces,
    )
    return replace(
        receipt,
        received_BT=torch.where(sent_BT, receipt.received_BT, torch.nan),
        clipped_BT=torch.where(sent_BT, receipt.clipped_BT, torch.nan),
        received_UBT=torch.where(sent_BT, receipt.received_UBT, torch.nan),
        clipped_UBT=torch.where(sent_BT, receipt.clipped_UBT, torch.nan),
    )


def _pieces(of_ranks: Sequence[list[OptimiserStep]], width: int) -> Iterator[Piece]:
    """The micro-batches of the optimiser steps that have a written response; also the others of these steps, which count."""
    for update, of_step in enumerate(zip(*of_ranks, strict=True)):
        if any(len(piece.rows_b) for step in of_step for piece in step.pieces):
            for rank, step in enumerate(of_step):
                yield from (replace(piece, update=update, rank=rank).padded(width) for piece in step.pieces)
