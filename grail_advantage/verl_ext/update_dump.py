"""The rows of an update of the actor for the token dump (:mod:`grail_advantage.view.dump.files`).

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same rows by the same keys,
in its column ``uid``.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerBase
from verl.utils import tensordict_utils as tu

from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, outcome_of
from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.method_batch import MethodBatch
from grail_advantage.verl_ext.settings import DUMP_FOLDER, answer_of, dump_options
from grail_advantage.verl_ext.transfer import Rollouts
from grail_advantage.view.dump.step import StepDump, StepRows, neutral_reasons, size_estimate
from grail_advantage.weighting import BatchWeights

FIELDS = ("rm_scores", "reward_model", "extra_fields", "data_source", "extra_info", OLD_LOG_PROBS, ENTROPY)
"""Fields of TransferQueue for the written rows; it leaves out those that a run does not have."""
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

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(
        self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, signal: Signal, *, updates: int, steps: int
    ) -> None:
        self.method, self.signal = config.algorithm.adv_estimator, signal
        options, model, rollout = dump_options(config), config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{DUMP_FOLDER}={options.folder} cannot be made on the machine of the trainer: {error}; choose another folder"
            ) from error
        self._dump = StepDump(
            options.folder,
            tokenizer,
            every=options.every,
            rows=options.rows,
            updates=updates,
            model=str(model.path),
            temperature=float(rollout.temperature),
            answer=answer_of(config),
        )
        rows = config.data.train_batch_size * rollout.n
        rows = rows if options.rows is None else min(rows, options.rows)
        estimate = size_estimate(rows, config.data.max_response_length, steps // options.every)
        print(f"{estimate}, in {options.folder}", flush=True)

    @property
    def failed_files(self) -> int:
        """Files that could not be written."""
        return self._dump.writer.failed

    def writes(self, step: int) -> bool:
        """Whether rows of this training step are written."""
        return self._dump.writes(step)

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
        seen: MethodBatch,
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
            seen: the batch as the method sees it.
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
            fetched = tq.kv_batch_get(
                keys=[rollouts.keys[row] for row in chosen],
                partition_id=batch.partition_id,
                select_fields=list(FIELDS),
            )
            neutral = neutral_reasons(
                self.signal,
                seen.rows,
                valid_B=seen.batch.valid_B,
                advantages_B=seen.batch.advantages_B,
                truncated_B=seen.truncated_B,
                non_finite_B=result.non_finite_B,
            )
            rows = StepRows(
                method=self.method,
                signal=self.signal,
                keys=rollouts.keys,
                groups=rollouts.groups,
                prompts=rollouts.prompts,
                responses=rollouts.responses,
                generated=rollouts.generated,
                spans=seen.batch.spans,
                truncated_B=seen.truncated_B,
                neutral=neutral,
                mask_BT=seen.batch.mask_BT,
                scores_BT=torch.full_like(advantages_BT, float("nan")) if scores_BT is None else scores_BT,
                weights_BT=result.weights_BT,
                base_advantages_BT=seen.base_advantages_BT,
                advantages_BT=advantages_BT,
                rows_in_step=sum(of_run),
            )
            self._dump.write(step, update, chosen, rows.subset(chosen), lambda: _known(fetched, len(chosen)))


def _known(fetched: TensorDict, count: int) -> list[dict[str, Any]]:
    """Each row's values in TransferQueue, by the names of a dump's row; None for one that is not there."""
    plain = {
        name: _objects(fetched, name, count) for name in ("reward_model", "extra_fields", "data_source", "extra_info")
    }
    columns = {
        target: [values.detach().float().cpu().numpy().copy() for values in fetched[name].unbind()]
        for target, name in (("old_log_prob_T", OLD_LOG_PROBS), ("entropy_T", ENTROPY))
        if name in fetched.keys()  # noqa: SIM118  # a TensorDict has no `in`
    }
    rewards = (
        [float(values.sum()) for values in fetched["rm_scores"].unbind()]
        if "rm_scores" in fetched.keys()  # noqa: SIM118
        else [None] * count
    )
    known = []
    for row in range(count):
        reward = rewards[row]
        gold = _entry(plain["reward_model"][row], "ground_truth")
        index = _entry(plain["extra_info"][row], "index")
        source = plain["data_source"][row]
        known.append(
            {
                "gold": None if gold is None else str(gold),
                "reward": reward if reward is None or math.isfinite(reward) else None,
                "outcome": _outcome(_entry(plain["extra_fields"][row], "reward_extra_info"), reward),
                "id": f"{source}/{index}" if source is not None and index is not None else None,
                **{target: values[row] for target, values in columns.items()},
            }
        )
    return known


def _objects(fetched: TensorDict, name: str, count: int) -> list[Any]:
    values = tu.get(fetched, name) if name in fetched.keys() else None  # noqa: SIM118
    return [None] * count if values is None else list(values)


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _outcome(of_judge: Any, reward: float | None) -> str | None:
    """The judge's own ``acc`` where it gives one; else whether the reward is positive."""
    accuracy = _entry(of_judge, "acc")
    return outcome_of(reward if accuracy is None else float(accuracy))
