"""The trainer's part in leaving out rows that train nothing: whether, in which order, and the figures.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import logging

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.workers.config import HFModelConfig

from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.model_checks import adapter_config
from grail_advantage.verl_ext.neutral_rows import CUT_ENDS, spread_in_mini_batches, trained_lengths
from grail_advantage.verl_ext.neutral_settings import SKIP, NeutralRows, neutral_rows
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.verl_ext.transfer import Rollouts

logger = logging.getLogger(__name__)


class NeutralRowsTrainer:
    """Base of :class:`grail_advantage.verl_ext.trainer.TokenWeightTrainer`."""

    config: DictConfig
    signal: Signal
    own_advantages: bool
    _left_out = NeutralRows()
    _trained: dict[str, tuple[int, int, int]]
    """Of each row of the current batch, by key: tokens of the prompt, of the response, and of the response up to the last one
    that trains."""

    def _choose_left_out(self, model: HFModelConfig) -> None:
        """Choose what this run leaves out, and name each reason against it once."""
        described = {**model.hf_config.to_dict(), "adapter": adapter_config(self.config.actor_rollout_ref.model)}
        self._left_out, against = neutral_rows(self.config, self.signal, described, own_advantages=self.own_advantages)
        for line in against:
            logger.warning("%s: %s", SKIP, line)

    def _note_trained(self, rollouts: Rollouts, mask_BT: torch.Tensor, advantages_BT: torch.Tensor) -> None:
        """Note the tokens of the current batch that train, given its final advantages."""
        prompts, responses = map(len, rollouts.prompts), map(len, rollouts.responses)
        lengths = zip(prompts, responses, trained_lengths(advantages_BT, mask_BT), strict=True)
        self._trained = dict(zip(rollouts.keys, lengths, strict=True))

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self._left_out.rows:
            return super()._update_actor(batch, metrics)
        left, actor = self._left_out, self.config.actor_rollout_ref.actor
        lengths, wholes = [], []
        for key in batch.keys:
            prompt, response, trained = self._trained[key]
            wholes.append(prompt + response)
            lengths.append(prompt + (trained if left.ends else response) if trained else 0)
        request = batch
        if not actor.shuffle:  # else verl draws mini-batches by the places of rows, which then have to stay
            rows = [row for row, length in enumerate(lengths) if length]
            mini_batch_rows = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
            order = spread_in_mini_batches(lengths, rows, data_parallel_size(self.actor_rollout_wg), mini_batch_rows)
            request = batch.select_keys([batch.keys[row] for row in order])
        request.extra_info[CUT_ENDS] = left.ends
        written = super()._update_actor(request, metrics)
        of_run = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        metrics["token_weights/skipped_rows"] = sum(not lengths[row] for row in of_run)
        metrics["token_weights/skipped_tokens"] = sum(wholes[row] - lengths[row] for row in of_run)
        return written.select_keys(batch.keys)
