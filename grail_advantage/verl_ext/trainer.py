"""verl's three v1 trainers with token weights. Three of their stages differ.

``_compute_advantage``: the base advantage comes from verl's own code, by default GRPO's (with
``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also applies a KL penalty in the reward, rollout correction and
multi-output sessions. The responses are then fetched, the method gives scores to those that it selects, by a pass in
the actor where it uses the model, and the advantages in TransferQueue are multiplied by the token weights.
``_update_actor``: responses that train nothing are left out where a run asks for it. ``_compute_old_log_prob``: is left to
the update's own forward where a run asks for it (:mod:`grail_advantage.verl_ext.own_forward`).

:class:`TokenWeightTrainer` goes before any trainer of verl's, or of one's own, in the bases of a class:

    @register_trainer("mine_weighted")
    class MyTrainerWithTokenWeights(TokenWeightTrainer, MyTrainer): ...

The weights come from the policy that gives the old log-probabilities: the actor as it is. With ``separate_async`` and
``parameter_sync_step > 1`` the actor moves between the updates of a step while the old log-probabilities stay those of
the step's first policy, so a pass goes back to it as verl does (``PPOTrainerSeparateAsync._compute_old_log_prob``). In
bypass mode they are the rollout engine's, whose policy the trainer does not hold; the weights then come from the actor.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.utils.padding import response_from_nested, response_to_nested

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, Rollouts, Row, RowScores
from grail_advantage.method import BaseMethod
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.exchange import (
    LEAVE_OUT,
    PLACES,
    WATCHED,
    mini_batch_rows,
    nested,
    trains,
    update_order,
    update_places,
)
from grail_advantage.verl_ext.host import TIMING, WeighingTrainer, mean_of_loss
from grail_advantage.verl_ext.own_forward import REUSE, columns_of_ranks
from grail_advantage.verl_ext.settings import BASE, BYPASS, ROLLOUT
from grail_advantage.verl_ext.worker import TokenWeightActorWorker

STEP_POLICY = 0  # under which verl's separate trainer keeps the policy of a step's first update in the workers


class TokenWeightTrainer(WeighingTrainer):
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    parameter_sync_step: int  # verl's
    local_trigger_step: int

    def __init__(self, config: DictConfig) -> None:
        self._read_settings(config)
        # Before verl's constructor, which compares the mode with verl's own names.
        patches.set_trainer_mode(config, patches.base_mode(type(self)))
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        # Roles and their workers are there once verl's method has run.
        self._replace_workers()

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._look_at_model()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self._look_at_data(updates=self.parameter_sync_step)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's, unless the update's own forward gives them. An agent loop with several outputs a session can make more
        responses than one mini-batch has."""
        one_mini_batch = len(batch) <= mini_batch_rows(self.settings)
        self._own_forward = self._reuses and one_mini_batch and self._on_policy()
        if self._own_forward:
            return batch
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # verl compares the rollout's log-probabilities with the old ones, which the own forward gives later.
        corrects = not self._own_forward
        base = self.settings[BASE]
        with patches.base_advantages(self.config.algorithm, base, corrects=corrects):
            batch = super()._compute_advantage(batch, metrics)
        keys = batch.keys
        partition = batch.partition_id
        with marked_timer(TIMING, self.timing_raw, color="purple"):
            data = tq.kv_batch_get(keys, partition, select_fields=self._field_names())
            weighed = self._weigh(keys, data)
            values = response_to_nested(weighed.advantages, nested(weighed.rollouts.responses))
            # verl's metrics of a step read both.
            columns = {"advantages": values, "returns": values.clone()}
            fields = TensorDict(columns, batch_size=len(batch))
            written = tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
        not_padding = [not tag.get("is_padding", False) for tag in batch.tags]
        metrics.update(self._report(not_padding, update=self.local_trigger_step))
        return written

    @property
    def _has_verls_advantages(self) -> bool:
        return super()._compute_advantage.__func__ is PPOTrainer._compute_advantage

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        weighed = self._weighed
        # It holds the whole batch, and must not live until the next step.
        del self._weighed
        rollouts = weighed.rollouts
        request = batch
        sent = [True] * len(rollouts)
        if self._skips:
            sent = trains(weighed.advantages, rollouts.mask)
            ranks = patches.data_parallel_size(self.actor_rollout_wg)
            request, figures = update_order(rollouts, sent, batch, self.settings, ranks)
            request.extra_info[LEAVE_OUT] = True
            metrics.update(figures)
        fields = request.fields
        places_B2 = None
        marks = None if self._dump is None else self._dump.marks
        if self._own_forward:
            request.extra_info[REUSE] = True
            # The workers keep by place what their forward gives (columns_of_ranks).
            places_B2 = update_places(len(rollouts))
        if marks is not None:
            # The dump's places are the same, with slots beside them.
            request.extra_info[WATCHED], places_B2 = marks
        if places_B2 is not None:
            field = TensorDict({PLACES: places_B2}, batch_size=len(rollouts))
            tq.kv_batch_put(keys=list(rollouts.keys), partition_id=batch.partition_id, fields=field)
            # None asks TransferQueue for every field, ours included.
            request.fields = None if fields is None else [*fields, PLACES]
        written = super()._update_actor(request, metrics)
        # verl goes on with this batch, and later requests are no update that is watched.
        for setting in (WATCHED, REUSE):
            request.extra_info.pop(setting, None)
        request.fields = fields
        if self._own_forward:
            metrics.update(self._take_own_forward(batch, rollouts))
        metrics.update(self._receive(batch, rollouts, sent))
        # In verl's order, not in that over the ranks.
        return written if request is batch else written.select_keys(batch.keys)

    def _take_own_forward(self, batch: KVBatchMeta, rollouts: Rollouts) -> dict[str, float]:
        """Hand the columns of the update's own forward to the dump; verl's metrics of them, over the responses that were
        in the update."""
        columns = columns_of_ranks(self.actor_rollout_wg.take_own_forward(), rollouts)
        if self._dump is not None:
            self._dump.write(columns)
        updated_BT = rollouts.mask & columns[OLD_LOG_PROBS].isfinite()
        metrics = {}
        if self.settings[f"{ROLLOUT}.calculate_log_probs"]:
            names = ["responses", ROLLOUT_LOG_PROBS]
            keys = list(rollouts.keys)
            fetched = tq.kv_batch_get(keys, batch.partition_id, select_fields=names)
            data = fetched.to_padded_tensor()
            data[OLD_LOG_PROBS] = columns[OLD_LOG_PROBS]
            data["response_mask"] = updated_BT
            metrics.update(calculate_debug_metrics(DataProto(batch=data)))
        # 0 for NaN: a mask does not take NaN out of a sum.
        metrics["actor/entropy"] = mean_of_loss(
            self.settings, columns[ENTROPY].nan_to_num(), updated_BT
        )
        return metrics

    def _log_probs_now(self, batch: KVBatchMeta, places: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of some of a batch's responses by the actor as it is, (B, T), from the forward over the
        batch that gave the old ones (``PPOTrainer._compute_old_log_prob``, trainer_base.py:1651)."""
        temperature = self.settings[f"{ROLLOUT}.temperature"]
        request = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        self.actor_rollout_wg.compute_log_prob(replace(batch, fields=None, extra_info=request))
        keys = [batch.keys[place] for place in places]
        names = ["log_probs", "response_mask"]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=names)
        log_probs = response_from_nested(*(data[name] for name in names))
        return log_probs.to_padded_tensor(0).float()


@register_trainer("grail_sync")
class TokenWeightTrainerSync(TokenWeightTrainer, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""


@register_trainer("grail_colocate_async")
class TokenWeightTrainerColocateAsync(TokenWeightTrainer, PPOTrainerColocateAsync):
    """verl's asynchronous trainer that shares its devices with the rollout, with token weights."""


class TokenWeightDetachActorWorker(TokenWeightActorWorker, DetachActorWorker):
    """Actor worker of the separate trainer: passes of methods, and policies kept in host memory."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: int) -> None:
        """Keep the current policy under the name ``n``, see ``DetachActorWorker``."""
        super().save_model_to_cpu(n)
        patches.copy_saved_shards(self.cpu_saved_models, n)


@register_trainer("grail_separate_async")
class TokenWeightTrainerSeparateAsync(TokenWeightTrainer, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with rollout devices of their own, with token weights."""

    actor_worker_class = TokenWeightDetachActorWorker

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> list[RowScores]:
        """By the policy of the step's first update."""
        workers = self.actor_rollout_wg
        update = self.local_trigger_step
        # The first update is by that policy already; in bypass mode nobody here holds it.
        if not rows or update == 0 or self.settings[BYPASS]:
            return super().scores(method, rows)
        workers.save_model_to_cpu(update)
        workers.restore_model_from_cpu(STEP_POLICY)
        try:
            return super().scores(method, rows)
        finally:  # the update that comes next is of the current policy
            workers.restore_model_from_cpu(update)
            workers.clear_cpu_model(update)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        # The step's later updates go back to this policy, which verl's method, left out here, would have kept.
        if self._own_forward and self.parameter_sync_step > 1:
            self.actor_rollout_wg.save_model_to_cpu(STEP_POLICY)
        return batch

    def _on_policy(self) -> bool:
        # The old log-probabilities of later updates are those of the step's first policy.
        return super()._on_policy() and self.local_trigger_step == 0
