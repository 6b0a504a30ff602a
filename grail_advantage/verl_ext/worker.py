"""verl's actor worker with the passes of methods, and with updates that leave out zero-advantage responses and read what
the others receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from grail_advantage.method import Method
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import PLACES, WATCHED, build_reply, rows_of
from grail_advantage.verl_ext.received import OptimiserStep, UpdateReader
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT, without_zero_advantage


def token_scores(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Run the request's method on this rank's responses; the reply has them in their order. A collective: every rank of
    the data-parallel group calls it with the same number of responses, and every rank of a sequence-parallel group with
    the same responses."""
    names = ("temperature", "step", "pad_token")
    model = EngineModel(engine, **{name: tu.get_non_tensor_data(request, name, default=None) for name in names})
    method: Method = tu.get_non_tensor_data(request, "signal", default=None)
    rows = [replace(row, tokens=row.tokens.to(get_device_id())) for row in rows_of(request)]
    with engine.eval_mode():
        model.check_packing()
        return build_reply(method.run(rows, model))


class TokenWeightTrainingWorker(TrainingWorker):
    """``TrainingWorker`` whose ``train_batch`` leaves out zero-advantage responses, and reads what the others receive,
    where a batch asks for it."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        self.update_reader = UpdateReader()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """verl's, over the responses that train (:mod:`grail_advantage.verl_ext.zero_advantage`)."""
        watched = WATCHED in data
        if watched:
            places_R2 = torch.stack(data[PLACES].unbind())  # TransferQueue may give it nested
            data = data.copy()
            data[PLACES], places = places_R2, places_R2[:, 0].tolist()
        if LEAVE_OUT in data:
            data = without_zero_advantage(self.engine, data)
        if not watched:
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
    def probe_neighbours(self, layout: str, tokens_S: torch.Tensor, longest: int, temperature: float) -> Finding:
        """Whether responses are the same beside others, in a layout: :meth:`EngineModel.probe`."""
        with self.actor.engine.eval_mode():
            return EngineModel(self.actor.engine, temperature=temperature).probe(layout, tokens_S, longest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_received(self, number: Any) -> list[OptimiserStep] | Exception | None:
        """What the responses of this rank received in an update (:meth:`UpdateReader.take`), or the error in reading it;
        nothing from the other ranks of a sequence-parallel group, which have the same responses."""
        try:
            steps = self.actor.update_reader.take(number)
        except Exception as error:
            return error
        return steps if self.actor.engine.is_mp_src_rank_with_outputs() else None
