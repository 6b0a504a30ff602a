"""verl's actor worker with the passes of signals, on their own or on the forward that recomputes the old log-probabilities, and
with updates that leave out zero-advantage responses."""

from __future__ import annotations

from dataclasses import replace

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.patches import replace_infer_batch
from grail_advantage.verl_ext.shared_forward import infer_batch_with_saliency
from grail_advantage.verl_ext.zero_advantage import CUT_TAILS, without_zero_advantage


def token_scores(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Run the request's signal on this rank's rows.

    A collective: every rank of the data-parallel group calls it with the same number of rows, and every rank of a
    sequence-parallel group with the same rows.

    Args:
        engine: verl's FSDP engine, initialised.
        request: from :func:`grail_advantage.verl_ext.exchange.build_request`.

    Returns:
        The rows in their order, see :func:`grail_advantage.verl_ext.exchange.build_reply`.
    """
    settings = {
        name: tu.get_non_tensor_data(request, name, default=None) for name in ("temperature", "step", "pad_token")
    }
    signal: Signal = tu.get_non_tensor_data(request, "signal", default=None)
    rows = [replace(row, tokens_S=row.tokens_S.to(get_device_id())) for row in rows_of(request)]
    with engine.eval_mode():
        return build_reply(signal.run(rows, EngineModel(engine, **settings)))


class TokenWeightTrainingWorker(TrainingWorker):
    """``TrainingWorker`` whose ``infer_batch`` also gives saliency, and whose ``train_batch`` leaves out rows that train
    nothing, where a batch asks for it."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        replace_infer_batch(self.engine, infer_batch_with_saliency)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """verl's, over the rows that train (:mod:`grail_advantage.verl_ext.zero_advantage`)."""
        return super().train_batch(without_zero_advantage(self.engine, data) if CUT_TAILS in data else data)


class TokenWeightActorWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` that also computes token scores with the actor's engine."""

    actor_worker_cls = TokenWeightTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_token_scores(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`token_scores` on this rank's share of the rows."""
        output = token_scores(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None
