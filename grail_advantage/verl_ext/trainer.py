"""verl's PPO trainer with token weights. Two of its stages differ.

``_compute_advantage``: the base advantage comes from verl's own code, by default GRPO's (with
``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also applies a KL penalty in the reward, rollout correction and
multi-output sessions. The responses are then fetched, the method gives scores to those that it selects, by a pass in
the actor where it uses the model, and the advantages in TransferQueue are multiplied by the token weights.
``_update_actor``: responses that train nothing are left out where a run asks for it.

:class:`TokenWeightTrainer` goes before any trainer of verl's, or of one's own, in the bases of a class:

    @register_trainer("mine_weighted")
    class MyTrainerWithTokenWeights(TokenWeightTrainer, MyTrainer): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.debug import marked_timer
from verl.workers.utils.padding import response_from_nested, response_to_nested

from grail_advantage.verl_ext.exchange import PLACES, WATCHED, nested
from grail_advantage.verl_ext.host import TIMING, WeighingTrainer
from grail_advantage.verl_ext.patches import base_mode, data_parallel_size, estimator_named, set_trainer_mode
from grail_advantage.verl_ext.settings import BASE, ROLLOUT
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT, trains, update_order


class TokenWeightTrainer(WeighingTrainer):
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    def __init__(self, config: DictConfig) -> None:
        self._read_settings(config)
        set_trainer_mode(config, base_mode(type(self)))
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self._replace_workers()

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._look_at_model()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self._look_at_data(updates=self.parameter_sync_step)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with estimator_named(self.config.algorithm, self.settings[BASE]):
            batch = super()._compute_advantage(batch, metrics)
        with marked_timer(TIMING, self.timing_raw, color="purple"):
            data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=self._field_names())
            weighed = self._weigh(batch.keys, data)
            values = response_to_nested(weighed.advantages, nested(weighed.rollouts.responses))
            fields = TensorDict({"advantages": values, "returns": values.clone()}, batch_size=len(batch))
            written = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        of_run = [not tag.get("is_padding", False) for tag in batch.tags]
        metrics.update(self._report(data, of_run, update=self.local_trigger_step))
        return written

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        weighed, self._weighed = self._weighed, None
        rollouts, request, sent = weighed.rollouts, batch, [True] * len(weighed.rollouts)
        if self._skips:
            sent = trains(weighed.advantages, rollouts.mask)
            places = {key: place for place, key in enumerate(rollouts.keys)}
            of_run = [not tag.get("is_padding", False) for tag in batch.tags]
            order = [places[key] for key in batch.keys]
            given = self.settings, data_parallel_size(self.actor_rollout_wg)
            rows, figures = update_order(rollouts, sent, order, of_run, *given)
            request = batch if rows is None else batch.select_keys([batch.keys[row] for row in rows])
            request.extra_info[LEAVE_OUT] = True
            metrics.update(figures)
        fields, watched = request.fields, None if self._dump is None else self._dump.watched
        if watched is not None:
            field = TensorDict({PLACES: watched.places_B2(len(rollouts))}, batch_size=len(rollouts))
            tq.kv_batch_put(keys=list(rollouts.keys), partition_id=batch.partition_id, fields=field)
            request.fields = None if fields is None else [*fields, PLACES]
            request.extra_info[WATCHED] = watched.number
        written = super()._update_actor(request, metrics)
        if watched is not None:
            request.extra_info.pop(WATCHED)
            request.fields = fields
            metrics.update(self._receive(batch, rollouts, sent))
        return written if request is batch else written.select_keys(batch.keys)

    def _log_probs_now(self, batch: KVBatchMeta, places: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of some of a batch's responses by the actor as it is, (B, T), from the forward over the batch
        that gave the old ones (``PPOTrainer._compute_old_log_prob``, trainer_base.py:1651)."""
        temperature = self.settings[f"{ROLLOUT}.temperature"]
        asked = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        self.actor_rollout_wg.compute_log_prob(replace(batch, fields=None, extra_info=asked))
        keys = [batch.keys[place] for place in places]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=["log_probs", "response_mask"])
        return response_from_nested(data["log_probs"], data["response_mask"]).to_padded_tensor(0).float()
