"""verl's three trainers with token weights, see :mod:`grail_advantage.verl_ext.trainer`.

The weights come from the policy that gives the old log-probabilities. With ``colocate_async`` that is the actor as it
is. With ``separate_async`` and ``parameter_sync_step > 1`` the actor moves between the updates of a step while the old
log-probabilities stay those of the step's first policy, so a pass goes back to it as verl does
(``PPOTrainerSeparateAsync._compute_old_log_prob``). In bypass mode the old log-probabilities are the rollout engine's,
whose policy the trainer does not hold; the weights then come from the actor as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer

from grail_advantage.data import Row, RowScores
from grail_advantage.verl_ext.patches import copy_saved_shards
from grail_advantage.verl_ext.settings import BYPASS, TRAINER_PREFIX
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.worker import TokenWeightActorWorker

STEP_POLICY = 0
"""Name under which verl's separate trainer keeps the policy of a step's first update in the workers."""


class TokenWeightDetachActorWorker(TokenWeightActorWorker, DetachActorWorker):
    """Actor worker of the separate trainer: passes of signals, and policies kept in host memory."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: int) -> None:
        """Keep the current policy under the name ``n``, see ``DetachActorWorker``."""
        super().save_model_to_cpu(n)
        copy_saved_shards(self.cpu_saved_models, n)


@register_trainer(f"{TRAINER_PREFIX}sync")
class TokenWeightTrainerSync(TokenWeightTrainer, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""


@register_trainer(f"{TRAINER_PREFIX}colocate_async")
class TokenWeightTrainerColocateAsync(TokenWeightTrainer, PPOTrainerColocateAsync):
    """verl's asynchronous trainer that shares its devices with the rollout, with token weights."""


@register_trainer(f"{TRAINER_PREFIX}separate_async")
class TokenWeightTrainerSeparateAsync(TokenWeightTrainer, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with rollout devices of their own, with token weights."""

    actor_worker_class = TokenWeightDetachActorWorker

    def _run_pass(self, rows: Sequence[Row]) -> list[RowScores]:
        """By the policy of the step's first update."""
        workers, update = self.actor_rollout_wg, self.local_trigger_step
        if update == 0 or self.settings[BYPASS]:
            return super()._run_pass(rows)
        workers.save_model_to_cpu(update)
        workers.restore_model_from_cpu(STEP_POLICY)
        try:
            return super()._run_pass(rows)
        finally:
            workers.restore_model_from_cpu(update)
            workers.clear_cpu_model(update)

    def _on_policy(self) -> bool:
        # The old log-probabilities of later updates are those of the step's first policy.
        return super()._on_policy() and self.local_trigger_step == 0
