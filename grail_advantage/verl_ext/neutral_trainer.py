"""The trainer's part in leaving out rows that train nothing: whether, in which order, and the figures.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
from verl.workers.config import HFModelConfig

from grail_advantage.batch import OLD_LOG_PROBS
from grail_advantage.verl_ext.model_checks import adapter_config
from grail_advantage.verl_ext.neutral_rows import CUT_ENDS, spread_in_mini_batches, trained_lengths
from grail_advantage.verl_ext.neutral_settings import SKIP, NeutralRows, neutral_rows
from grail_advantage.verl_ext.patches import data_parallel_size, without_rollout_correction
from grail_advantage.verl_ext.selection import Selection
from grail_advantage.verl_ext.transfer import Rollouts, fetch_padded, put_no_log_probs
from grail_advantage.verl_ext.update_dump import UpdateDump

logger = logging.getLogger(__name__)


class NeutralRowsTrainer:
    """Base of :class:`grail_advantage.verl_ext.trainer.TokenWeightTrainer`."""

    config: DictConfig
    own_advantages: bool
    _dump: UpdateDump | None = None
    _left_out = NeutralRows()
    _trained: dict[str, tuple[int, int, int]]
    """Of each row of the current batch, by key: tokens of the prompt, of the response, and of the response up to the last one
    that trains."""
    _no_forward: frozenset[str] = frozenset()
    """Rows of the current batch without a forward of the old log-probabilities."""

    def _choose_left_out(self, model: HFModelConfig) -> None:
        """Choose what this run leaves out, and name each reason against it once."""
        described = {**model.hf_config.to_dict(), "adapter": adapter_config(self.config.actor_rollout_ref.model)}
        self._left_out, against = neutral_rows(self.config, described, own_advantages=self.own_advantages)
        for line in against:
            logger.warning("%s: %s", SKIP, line)

    def _rows_with_forward(self, rollouts: Rollouts, selection: Selection) -> list[int]:
        """The rows that get a forward of the old log-probabilities: those with an advantage, those that the method selects, and
        the shortest others, so that ranks and micro-batches come out even."""
        rows = list(range(len(rollouts.keys)))
        dumped = self._dump is not None and self._dump.writes(self.global_steps)
        if dumped or not self._left_out.old_log_probs:
            return rows
        needed_B = ((selection.advantages_BT != 0) & selection.batch.mask_BT).any(dim=1) | selection.rows.selected_B
        unit, rollout = data_parallel_size(self.actor_rollout_wg), self.config.actor_rollout_ref.rollout
        if not rollout.log_prob_use_dynamic_bsz:
            unit *= rollout.log_prob_micro_batch_size_per_gpu
        count = max(1, -(-int(needed_B.sum()) // unit)) * unit
        lengths = rollouts.lengths
        return sorted(sorted(rows, key=lambda row: (not needed_B[row], lengths[row]))[:count])

    def _with_all_rows(self, written: KVBatchMeta, batch: KVBatchMeta, rollouts: Rollouts) -> KVBatchMeta:
        """The batch with NaN in the rows that had no forward of the old log-probabilities."""
        inferred = set(written.keys)
        lengths = {
            key: (len(prompt) + len(response), len(response))
            for key, prompt, response in zip(rollouts.keys, rollouts.prompts, rollouts.responses, strict=True)
            if key not in inferred
        }
        self._no_forward = frozenset(lengths)
        if not lengths:
            return written.select_keys(batch.keys)
        put_no_log_probs(lengths, written)
        return replace(batch, fields=written.fields, extra_info=written.extra_info)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self._no_forward or self.config.algorithm.get("rollout_correction", None) is None:
            return super()._compute_advantage(batch, metrics)
        with without_rollout_correction(self.config.algorithm):
            written = super()._compute_advantage(batch, metrics)
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            compared = batch.select_keys([key for key in batch.keys if key not in self._no_forward])
            columns = fetch_padded(compared, OLD_LOG_PROBS, "rollout_log_probs", "response_mask")
            metrics.update(compute_rollout_corr_metrics_from_logprobs(*columns))
        return written

    def _note_trained(self, rollouts: Rollouts, selection: Selection, advantages_BT: torch.Tensor) -> None:
        """Note the tokens of the current batch that train, given its final advantages."""
        trained = trained_lengths(advantages_BT, selection.batch.mask_BT)
        for key, length, selected in zip(rollouts.keys, trained, selection.rows.selected_B.tolist(), strict=True):
            if key in self._no_forward and (length or selected):
                raise RuntimeError(
                    f"row {key} had no advantage by its reward, and so no old log-probabilities, but is trained now; set "
                    f"{SKIP}=false, or own_advantages=True in the class of the trainer"
                )
        lengths = zip(map(len, rollouts.prompts), map(len, rollouts.responses), trained, strict=True)
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
