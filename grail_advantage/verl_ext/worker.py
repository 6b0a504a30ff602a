"""verl's actor worker with the saliency pass."""

from __future__ import annotations

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from grail_advantage.verl_ext.token_pass import saliency_pass


class TokenWeightActorWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` that also computes saliencies with the actor's engine."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_saliency(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`grail_advantage.verl_ext.token_pass.saliency_pass` on this rank's share of the rows."""
        output = saliency_pass(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None
