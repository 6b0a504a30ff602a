"""The rows of an update of the actor for the token dump.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerBase

from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.dump import FIELDS, StepDump, StepRows, neutral_reasons, size_estimate
from grail_advantage.verl_ext.selection import Selection
from grail_advantage.verl_ext.settings import dump_options
from grail_advantage.verl_ext.transfer import Rollouts
from grail_advantage.weighting import BatchWeights

CHECKPOINT_SECONDS = 60.0
"""Seconds that a checkpoint waits for the dump of its steps."""


class UpdateDump:
    """Writes the rows of updates, from the trainer's process. An error in it does not stop the training.

    Args:
        config: the run's.
        tokenizer: the model's.
        signal: the method.
        updates: updates of the actor in a step.
        steps: steps of the run.
    """

    def __init__(
        self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, signal: Signal, *, updates: int, steps: int
    ) -> None:
        self.method, self.signal = config.algorithm.adv_estimator, signal
        options, model, rollout = dump_options(config), config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        self._dump = StepDump(
            options, tokenizer, model=str(model.path), temperature=float(rollout.temperature), updates=updates
        )
        rows = config.data.train_batch_size * rollout.n
        rows = rows if options.rows is None else min(rows, options.rows)
        estimate = size_estimate(rows, config.data.max_response_length, steps // options.every)
        print(f"{estimate}, in {options.folder}", flush=True)

    @property
    def failed_files(self) -> int:
        """Files that could not be written."""
        return self._dump.writer.failed

    def wait(self) -> None:
        """Wait until the rows so far are written, for a checkpoint of the step."""
        self._dump.writer.wait(CHECKPOINT_SECONDS)

    def close(self) -> None:
        """Write the remaining rows."""
        self._dump.writer.close()

    def write(
        self,
        batch: KVBatchMeta,
        rollouts: Rollouts,
        selection: Selection,
        scores_BT: torch.Tensor | None,
        result: BatchWeights,
        advantages_BT: torch.Tensor,
        *,
        step: int,
        update: int,
    ) -> None:
        """Hand the update's rows to the writer.

        Args:
            batch: keys of the rows.
            rollouts: prompts and responses.
            selection: the batch as the method sees it.
            scores_BT: NaN where there is no score; ``None`` for a method without scores.
            result: the weights.
            advantages_BT: after weighting.
            step: training step.
            update: number of the update in the step.
        """
        with self._dump.writer.attempt():
            of_run = [not tag.get("is_padding", False) for tag in batch.tags]
            chosen = self._dump.choose(step, update, rollouts.groups, of_run)
            if not chosen:
                return
            seen = selection.batch
            fetched = tq.kv_batch_get(
                keys=[rollouts.keys[row] for row in chosen],
                partition_id=batch.partition_id,
                select_fields=list(FIELDS),
            )
            neutral = neutral_reasons(
                self.signal,
                selection.rows,
                valid_B=seen.valid_B,
                advantages_B=seen.advantages_B,
                truncated_B=selection.truncated_B,
                non_finite_B=result.non_finite_B,
                spans=seen.spans,
            )
            rows = StepRows(
                method=self.method,
                signal=self.signal,
                keys=rollouts.keys,
                groups=rollouts.groups,
                prompts=rollouts.prompts,
                responses=rollouts.responses,
                spans=seen.spans,
                truncated_B=selection.truncated_B,
                neutral=neutral,
                mask_BT=seen.mask_BT,
                scores_BT=torch.full_like(advantages_BT, float("nan")) if scores_BT is None else scores_BT,
                weights_BT=result.weights_BT,
                base_advantages_BT=selection.base_advantages_BT,
                advantages_BT=advantages_BT,
                rows_in_step=sum(of_run),
            )
            self._dump.write(step, update, chosen, rows, fetched)
