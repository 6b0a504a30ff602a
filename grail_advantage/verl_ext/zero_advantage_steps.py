"""Leaving out zero-advantage responses over a trainer's steps: which rows, in which order, and the figures.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs

from grail_advantage.batch import OLD_LOG_PROBS
from grail_advantage.verl_ext.method_batch import MethodBatch
from grail_advantage.verl_ext.patches import without_rollout_correction
from grail_advantage.verl_ext.transfer import Rollouts, fetch_padded, put_no_log_probs
from grail_advantage.verl_ext.zero_advantage_rules import SKIP, Skipping
from grail_advantage.verl_ext.zero_advantage_update import (
    CUT_TAILS,
    lengths_in_update,
    spread_in_mini_batches,
    trained_lengths,
)


class ZeroAdvantageSteps:
    """The batches of a run, one after the other; see :class:`grail_advantage.verl_ext.trainer.TokenWeightTrainer`.

    Args:
        config: the run's.
        skipping: what is left out.
    """

    def __init__(self, config: DictConfig, skipping: Skipping) -> None:
        self.skipping = skipping
        self._config = config
        self._no_forward: frozenset[str] = frozenset()
        """Rows of the current batch without a forward of the old log-probabilities."""
        self._lengths: dict[str, tuple[int, int, int]] = {}
        """Of each row of the current batch, by key: tokens of the prompt, of the response, and of the response up to the last
        one that trains."""

    def begin_batch(self) -> None:
        """Forget the last batch."""
        self._no_forward = frozenset()

    def rows_with_forward(self, rollouts: Rollouts, seen: MethodBatch, ranks: int) -> list[int]:
        """The rows that get a forward of the old log-probabilities: those with an advantage, those that the method selects, and
        the shortest others, so that ranks and micro-batches come out even.

        Args:
            rollouts: of the batch.
            seen: the batch by its rewards alone.
            ranks: number of data-parallel ranks.
        """
        needed_B = ((seen.advantages_BT != 0) & seen.batch.mask_BT).any(dim=1) | seen.rows.selected_B
        unit, rollout = ranks, self._config.actor_rollout_ref.rollout
        if not rollout.log_prob_use_dynamic_bsz:
            unit *= rollout.log_prob_micro_batch_size_per_gpu
        count = max(1, -(-int(needed_B.sum()) // unit)) * unit
        lengths = rollouts.lengths
        by_need = sorted(range(len(lengths)), key=lambda row: (not needed_B[row], lengths[row]))
        return sorted(by_need[:count])

    def put_missing_log_probs(self, written: KVBatchMeta, batch: KVBatchMeta, rollouts: Rollouts) -> KVBatchMeta:
        """The batch with NaN in the rows that had no forward of the old log-probabilities.

        Args:
            written: the rows that had it.
            batch: all rows.
            rollouts: of all rows.
        """
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

    @contextmanager
    def correction_of_known_rows(self, batch: KVBatchMeta, metrics: dict) -> Iterator[None]:
        """Within, verl takes no metrics of a rollout correction where rows have no old log-probabilities; those of the others
        are in ``metrics`` afterwards."""
        if not self._no_forward or self._config.algorithm.get("rollout_correction", None) is None:
            yield
            return
        with without_rollout_correction(self._config.algorithm):
            yield
        if self._config.actor_rollout_ref.rollout.calculate_log_probs:
            compared = batch.select_keys([key for key in batch.keys if key not in self._no_forward])
            columns = fetch_padded(compared, OLD_LOG_PROBS, "rollout_log_probs", "response_mask")
            metrics.update(compute_rollout_corr_metrics_from_logprobs(*columns))

    def note_trained(self, rollouts: Rollouts, seen: MethodBatch, advantages_BT: torch.Tensor) -> None:
        """Note the tokens of the current batch that train, given its final advantages.

        Raises:
            RuntimeError: a row trains that has no old log-probabilities.
        """
        trained = trained_lengths(advantages_BT, seen.batch.mask_BT)
        for key, length, selected in zip(rollouts.keys, trained, seen.rows.selected_B.tolist(), strict=True):
            if key in self._no_forward and (length or selected):
                raise RuntimeError(
                    f"response {key} had no advantage by its reward, and so no old log-probabilities, but is trained now; set "
                    f"{SKIP}=false, or own_advantages=True in the class of the trainer"
                )
        lengths = zip(map(len, rollouts.prompts), map(len, rollouts.responses), trained, strict=True)
        self._lengths = dict(zip(rollouts.keys, lengths, strict=True))

    def update_request(self, batch: KVBatchMeta, ranks: int) -> tuple[KVBatchMeta, dict[str, int]]:
        """The batch for the workers' update, and the figures of what is left out.

        Args:
            batch: all rows, in verl's order.
            ranks: number of data-parallel ranks.
        """
        actor = self._config.actor_rollout_ref.actor
        prompts, responses, trained = zip(*(self._lengths[key] for key in batch.keys), strict=True)
        kept = lengths_in_update(trained, responses, cut_tails=self.skipping.cut_tails)
        wholes = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        lengths = [prompt + length if length else 0 for prompt, length in zip(prompts, kept, strict=True)]
        request = batch
        if not actor.shuffle:  # else verl draws mini-batches by the places of rows, which then have to stay
            mini_batch_rows = actor.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n
            request = batch.select_keys(_in_order(batch.keys, lengths, ranks, mini_batch_rows))
        request.extra_info[CUT_TAILS] = self.skipping.cut_tails
        of_run = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        return request, {
            "token_weights/skipped_responses": sum(not lengths[row] for row in of_run),
            "token_weights/skipped_tokens": sum(wholes[row] - lengths[row] for row in of_run),
        }


def _in_order(keys: Sequence[str], lengths: list[int], ranks: int, mini_batch_rows: int) -> list[str]:
    trained = [row for row, length in enumerate(lengths) if length]
    return [keys[row] for row in spread_in_mini_batches(lengths, trained, ranks, mini_batch_rows)]
