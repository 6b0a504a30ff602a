"""verl's actor worker with the passes of methods, and with updates that leave out zero-advantage responses and read
what each token of the others receives (:mod:`grail_advantage.receipt`).

:class:`UpdateReader` works around the loss function that verl gives the worker: it reads the gradient of the tensor of
log-probabilities that goes into the loss, and changes nothing. Gradients are kept for the responses that the token dump
writes. Shape suffixes: R responses of a rank, S tokens of prompt and response, T response tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from grail_advantage.method import BaseMethod
from grail_advantage.model.probe import Finding
from grail_advantage.receipt import Piece
from grail_advantage.receipt.measure import Gradient
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import (
    LEAVE_OUT,
    PLACES,
    WATCHED,
    build_reply,
    rows_of,
    without_zero_advantage,
)
from grail_advantage.verl_ext.own_forward import REUSE, OwnForward


def token_scores(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Run the request's method on this rank's responses; the reply has them in their order. A collective: every rank of
    the data-parallel group calls it with the same number of responses, and every rank of a sequence-parallel group with
    the same responses."""
    names = ("temperature", "step", "pad_token")
    model = EngineModel(engine, **{name: tu.get(request, name) for name in names})
    method: BaseMethod = tu.get(request, "signal")
    rows = [replace(row, tokens=row.tokens.to(get_device_id())) for row in rows_of(request)]
    with engine.eval_mode():
        model.check_packing()
        return build_reply(method.run(rows, model))


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
        self._begin(None)

    def _begin(self, number: Any) -> None:
        self._number = number
        self._steps: list[OptimiserStep] = []
        self._error: Exception | None = None

    @contextmanager
    def optimiser_step(
        self, worker: Any, data: TensorDict, places: Sequence[int]
    ) -> Iterator[None]:
        """Within, the loss function of verl's ``TrainingWorker`` reads the log-probabilities of ``data`` too, which has
        the field ``PLACES`` and the setting ``WATCHED``. ``places``: of all responses of the optimiser step."""
        scale = 1.0
        loss_fn = worker.loss_fn
        readings = []

        def read(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            with self._attempt():
                # The fields of verl's no_padding_2_padding(): a whole batch may hold far more.
                fields = data.select(PLACES, "prompts", "responses", "attention_mask", strict=False)
                readings.append((Gradient(model_output["log_probs"]), fields))
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        with self._attempt():
            number = tu.get(data, WATCHED)
            if number != self._number:
                # Steps of another update were not taken, and go.
                self._begin(number)
            # Of the gradients in float16.
            scaler = getattr(worker.engine, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
        worker.loss_fn = read
        try:
            yield
        finally:
            worker.loss_fn = loss_fn
        with self._attempt():
            self._steps.append(
                OptimiserStep(list(places), [_piece(*reading, scale) for reading in readings])
            )

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def take(self, number: Any) -> list[OptimiserStep]:
        """The optimiser steps of the update with this number, which are forgotten here; raises the error that came up
        while they were read."""
        watched = self._number
        steps = self._steps
        error = self._error
        self._begin(None)
        if error is not None:
            raise error
        if number != watched:
            raise RuntimeError(f"update {number} was not watched here; the last one was {watched}")
        return steps


def _piece(reading: Gradient, data: TensorDict, scale: float) -> Piece:
    """A micro-batch after its backward, cut to the responses that have a slot."""
    gradient = torch.zeros_like(reading.log_probs) if reading.values is None else reading.values
    # As verl's loss cuts them, in their own type, which says how exact the gradient is.
    log_probs_RT = no_padding_2_padding(reading.log_probs, data).cpu()
    gradient_RT = no_padding_2_padding(gradient, data).cpu()
    # Prompt tokens, and the last position, must have received nothing: check() names those that did.
    reached_R = (gradient.cpu().to_padded_tensor(0) != 0).sum(dim=1)
    slots_R = data[PLACES][:, 1].cpu()
    written_R = slots_R >= 0
    return Piece(
        rows_b=slots_R[written_R],
        log_probs_bT=log_probs_RT[written_R],
        gradient_bT=gradient_RT[written_R] / scale,
        outside_b=(reached_R - (gradient_RT != 0).sum(dim=1))[written_R],
    )


TO_RANKS = make_nd_compute_dataproto_dispatch_fn(mesh_name="train")


class TokenWeightTrainingWorker(TrainingWorker):
    """``TrainingWorker`` whose update leaves out zero-advantage responses, takes the old log-probabilities from its own
    first forward, and reads what the responses receive, where a batch asks for it."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        self.update_reader = UpdateReader()
        self.own_forward = OwnForward()

    @register(dispatch_mode=TO_RANKS, blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """verl's, with old log-probabilities where the batch has none (:mod:`grail_advantage.verl_ext.own_forward`)."""
        if REUSE not in data:
            return super().train_mini_batch(data)
        self.own_forward = OwnForward()
        with self.own_forward.of_update(self, data):
            return super().train_mini_batch(data)

    @register(dispatch_mode=TO_RANKS, blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """verl's, over the responses that train (:mod:`grail_advantage.verl_ext.exchange`)."""
        places: list[int] = []
        if PLACES in data:
            data = data.copy()
            # TransferQueue may give it nested.
            data[PLACES] = torch.stack(data[PLACES].unbind())
            # Of all responses: the loss's denominators count those that are left out, too.
            places = data[PLACES][:, 0].tolist()
        if REUSE in data:
            self.own_forward.ask_for_entropies(data)
        if LEAVE_OUT in data:
            data = without_zero_advantage(self.engine, data)
        if WATCHED not in data:
            return super().train_batch(data)
        with self.update_reader.optimiser_step(self, data, places):
            return super().train_batch(data)


class TokenWeightActorWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` that also computes token scores with the actor's engine."""

    actor_worker_cls = TokenWeightTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_token_scores(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`token_scores` on this rank's share of the responses."""
        output = token_scores(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe_neighbours(self, layout: str, longest: int, temperature: float) -> Finding:
        """Whether responses are the same beside others, in a layout: :meth:`EngineModel.probe`."""
        with self.actor.engine.eval_mode():
            return EngineModel(self.actor.engine, temperature=temperature).probe(layout, longest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_own_forward(self) -> dict[str, dict[int, Tensor]] | None:
        """The columns of the latest update's own forward (:class:`OwnForward`) on this rank, on the CPU; nothing from
        the other ranks of a sequence-parallel group, which have the same responses."""
        columns = self.actor.own_forward.columns
        self.actor.own_forward = OwnForward()
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None
        return {
            name: {place: values_T.cpu() for place, values_T in values.items()}
            for name, values in columns.items()
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_received(self, number: Any) -> list[OptimiserStep] | Exception | None:
        """What the responses of this rank received in an update (:meth:`UpdateReader.take`), or the error in reading
        it; nothing from the other ranks of a sequence-parallel group, which have the same responses."""
        try:
            steps = self.actor.update_reader.take(number)
        except Exception as error:
            return error
        return steps if self.actor.engine.is_mp_src_rank_with_outputs() else None
