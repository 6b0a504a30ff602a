"""verl's actor worker with the saliency pass, on its own or on the forward that recomputes the old log-probabilities."""

from __future__ import annotations

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from grail_advantage.verl_ext.fused_pass import serve_saliency
from grail_advantage.verl_ext.oar_pass import oar_pass
from grail_advantage.verl_ext.token_pass import saliency_pass


class SaliencyTrainingWorker(TrainingWorker):
    """``TrainingWorker`` whose ``infer_batch`` also gives saliency, where a batch asks for it."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        serve_saliency(self.engine)


class TokenWeightActorWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` that also computes token scores with the actor's engine."""

    actor_worker_cls = SaliencyTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_saliency(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`grail_advantage.verl_ext.token_pass.saliency_pass` on this rank's share of the rows."""
        output = saliency_pass(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_oar_scores(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`grail_advantage.verl_ext.oar_pass.oar_pass` on this rank's share of the rows."""
        output = oar_pass(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None
