"""Actor workers that keep ``nccl_timeout``, and resume with any number of ranks."""

from __future__ import annotations

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray

from grail_advantage.verl_ext.trainers import TokenWeightDetachActorWorker
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from recipe.run_life.ranks import any_number_of_ranks


class _KeptTrainingWorker(TokenWeightActorWorker.actor_worker_cls):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """verl's; the checkpoint may be one of another number of ranks."""
        with any_number_of_ranks(self.engine.checkpoint_manager, local_path):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)


class _Kept:
    actor_worker_cls = _KeptTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """verl's, with a process group that keeps ``actor_rollout_ref.nccl_timeout`` (seconds).

        Works around ``verl.workers.engine_workers.TrainingWorker.__init__`` (verl 0.9.1), which leaves the option out and so
        waits as long as torch does for a rank that does not come: 30 min with gloo. Can go when verl passes it on.
        """
        initialize_global_process_group_ray(timeout_second=self.config.nccl_timeout)
        super().init_model()


class KeptActorWorker(_Kept, TokenWeightActorWorker):
    pass


class KeptDetachActorWorker(_Kept, TokenWeightDetachActorWorker):
    """For the separate trainer."""
