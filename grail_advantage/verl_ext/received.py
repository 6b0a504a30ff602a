"""What each token of an update receives (:mod:`grail_advantage.receipt`), read in verl's workers, put together in the
trainer.

:class:`UpdateReader` runs in a worker, around the loss function that verl gives it: it reads the gradient of the tensor
of log-probabilities that goes into the loss, and changes nothing. :class:`Written` and :func:`receipt_of` are for the
trainer. Gradients are kept for the responses that the token dump writes. The loss's denominators, tokens and
responses, are counted over the whole optimiser step, or the check would divide wrongly.

Shape suffixes: R responses of a rank, B responses that are written, T response tokens, N packed tokens, U optimiser
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.data import OLD_LOG_PROBS, Weighed
from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check, verl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.settings import ACTOR, Settings

LOSS_COLUMNS = (OLD_LOG_PROBS, "rollout_is_weights", "ref_log_prob")
"""What the loss reads of a response beside its advantages."""

# ----------------------------------------------------------------------------------------------------------- in the
# workers


@dataclass
class OptimiserStep:
    """One optimiser step on one rank."""

    places: list[int]
    """The place in the update's batch of each response of this step, the left-out ones included."""
    pieces: list[Piece]
    """The step's micro-batches, cut to the responses that the dump writes, by their slots; on the CPU."""


class UpdateReader:
    """Reads, on one rank, what the responses of an update receive. An error in it stops no training: :meth:`take`
    raises it."""

    def __init__(self) -> None:
        self._number: Any = None
        self._steps: list[OptimiserStep] = []
        self._readings: list[tuple[Any, ...]] = []
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
            self._steps.append(OptimiserStep(list(places), [_piece(*reading, scale) for reading in readings]))

    def _reading(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        def read(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            with self._attempt():
                self._readings.append((Gradient(model_output["log_probs"]), data[PLACES], *_lengths(data)))
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


def _lengths(data: TensorDict) -> tuple[torch.Tensor, int]:
    """The lengths of prompts and responses, (R, 2), and the width of the loss's tensors: that of the older trainer's padded
    ones, else that of the longest response."""
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        lengths_R2 = torch.stack([of.offsets().diff() for of in (prompts, responses)], dim=1)
        return lengths_R2, int(lengths_R2[:, 1].max())
    widths = [prompts.shape[1], responses.shape[1]]
    of_parts = data["attention_mask"].split(widths, dim=1)
    return torch.stack([of.sum(dim=1) for of in of_parts], dim=1), widths[1]


def _piece(read: Gradient, places_R2: torch.Tensor, lengths_R2: torch.Tensor, width: int, scale: float) -> Piece:
    """A micro-batch after its backward."""
    # verl's log-probabilities are packed: those of prompt + response, each at the position before its token.
    log_probs_N = read.log_probs.values().cpu()  # in its own type, which says how exact the gradient is
    gradient_N = torch.zeros_like(log_probs_N) if read.values is None else read.values.values().cpu() / scale
    slots, log_probs, gradients, outside, start = [], [log_probs_N[:0]], [gradient_N[:0]], [], 0
    for (_, slot), (prompt, response) in zip(places_R2.tolist(), lengths_R2.tolist(), strict=True):
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
    slots_b = torch.tensor(slots, dtype=torch.int64)
    return Piece(slots_b, log_probs_bT, gradient_bT, outside_b=torch.tensor(outside), width=width)


# ----------------------------------------------------------------------------------------------------------- in the
# trainer


@dataclass(frozen=True)
class Written:
    """The written responses of an update."""

    number: str
    """Tells the update apart."""
    update: int
    """Its number in the step."""
    places: list[int]
    """Of the responses in the update's batch."""
    part: Weighed
    """These responses alone."""
    columns: Mapping[str, torch.Tensor]
    """Those of :data:`LOSS_COLUMNS` that the run has, (B, T)."""

    def places_B2(self, count: int) -> torch.Tensor:
        """The field ``PLACES`` of all ``count`` responses of the update."""
        slots = {place: slot for slot, place in enumerate(self.places)}
        return torch.tensor([[place, slots.get(place, -1)] for place in range(count)])


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
        **actor("tau_pos", "tau_neg", "policy_loss.dro_beta"),
        **actor("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
        **kl,
    )


def receipt_of(
    written: Written,
    of_ranks: Sequence[list[OptimiserStep]],
    *,
    sent: Sequence[bool],
    tokens: Sequence[int],
    loss: Loss,
    epochs: int,
    on_policy: bool,
) -> Receipt:
    """The receipt of an update, over the written responses.

    Args:
        of_ranks: the optimiser steps of each data-parallel rank.
        sent: which responses of the whole batch went into the update.
        tokens: of each response of the whole batch, those that train.
        on_policy: whether the old log-probabilities are those of the policy before the update.
    """
    mask_BT, updates = written.part.rollouts.mask, len(of_ranks[0])
    places = [[place for steps in of_ranks for place in steps[update].places] for update in range(updates)]
    sent_B = torch.tensor([sent[place] for place in written.places])
    pieces = list(_pieces(of_ranks, mask_BT.shape[1]))
    if loss.account == "kl_cov" and len(sent_B) < len(tokens):
        loss = replace(loss, account=None)  # which tokens it penalises follows from all responses of a micro-batch
    if not pieces:
        nothing_UBT = torch.full((updates, *mask_BT.shape), torch.nan)
        return Receipt(nothing_UBT[0], nothing_UBT[0], *[nothing_UBT] * 3, ())
    of_loss = dict(zip(("old_log_probs_BT", "weights_BT", "ref_log_probs_BT"), LOSS_COLUMNS, strict=True))
    batch = Batch(
        advantages_BT=written.part.advantages,
        mask_BT=mask_BT,
        **{name: written.columns.get(column) for name, column in of_loss.items()},
        left_out_B=~sent_B,
        updates=updates // epochs,
        epochs=epochs,
        ranks=len(of_ranks),
        on_policy=on_policy,
        keys=written.part.rollouts.keys,
        totals_U2=torch.tensor([[sum(tokens[p] for p in of_step), len(of_step)] for of_step in places]),
    )
    receipt = check(batch, loss, pieces)
    # Responses that were left out received nothing that was read.
    names = ("received_BT", "clipped_BT", "received_UBT", "clipped_UBT")
    seen = {name: torch.where(sent_B[:, None], getattr(receipt, name), torch.nan) for name in names}
    return replace(receipt, **seen)


def _pieces(of_ranks: Sequence[list[OptimiserStep]], width: int) -> Iterator[Piece]:
    """The micro-batches of the optimiser steps that have a written response; also the others of these steps, which
    count."""
    for update, of_step in enumerate(zip(*of_ranks, strict=True)):
        if any(len(piece.rows_b) for step in of_step for piece in step.pieces):
            for rank, step in enumerate(of_step):
                yield from (replace(piece, update=update, rank=rank).padded(width) for piece in step.pieces)
