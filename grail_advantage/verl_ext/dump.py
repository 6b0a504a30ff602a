"""The responses of an update of the actor for the token dump (:mod:`grail_advantage.dump.store`).

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same responses by the same
keys, in its column ``uid``.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerBase

from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, outcome_of
from grail_advantage.dump.step import StepDump, StepRows, reasons_without_scores, size_estimate
from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.received import (
    Written,
    fetch_loss_columns,
    loss_of,
    receipt_of,
    watch_request,
    without_watch,
)
from grail_advantage.verl_ext.rules import STRATEGY
from grail_advantage.verl_ext.settings import ACTOR, DUMP, ENGINES, MODEL, ROLLOUT, Settings
from grail_advantage.verl_ext.step import Step, objects
from grail_advantage.weighting import BatchWeights

FIELDS = ("rm_scores", "reward_model", "extra_fields", "data_source", "extra_info", OLD_LOG_PROBS, ENTROPY)
"""Fields of TransferQueue for the written responses; it leaves out those that a run does not have."""
TURN_REWARDS = ("turn_rewards", "turn_scores", "tool_rewards")
"""Fields with rewards by turn, of the reward function and of verl's agent loop."""
CHECKPOINT_SECONDS = 60.0
"""Seconds that a checkpoint waits for the dump of its steps."""


class UpdateDump:
    """Writes the responses of updates, from the trainer's process. An error in it does not stop the training.

    Args:
        settings: the run's, with a folder for the dump.
        tokenizer: the model's.
        updates: updates of the actor in a step.
        steps: steps of the run.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerBase, *, updates: int, steps: int) -> None:
        options = settings.dump
        self._reads_received = options.received and settings[STRATEGY] in ENGINES
        self._watched: Written | None = None
        options.make_folder(DUMP)
        self.steps = StepDump(
            options.folder,
            tokenizer,
            every=options.every,
            rows=options.responses,
            updates=updates,
            model=str(settings[f"{MODEL}.path"]),
            temperature=float(settings[f"{ROLLOUT}.temperature"]),
            answer=settings.answer,
        )
        """Chooses the responses, and writes their files."""
        responses = settings["data.train_batch_size"] * settings[f"{ROLLOUT}.n"]
        responses = responses if options.responses is None else min(responses, options.responses)
        estimate = size_estimate(responses, settings["data.max_response_length"], steps // options.every)
        print(f"{estimate}, in {options.folder}", flush=True)

    def write(
        self,
        step: Step,
        batch: KVBatchMeta,
        scores_BT: torch.Tensor | None,
        result: BatchWeights,
        advantages_BT: torch.Tensor,
        *,
        update: int,
    ) -> None:
        """Hand the update's responses to the writer.

        Args:
            step: the responses.
            batch: their keys and tags.
            scores_BT: NaN where there is no score; ``None`` for a method without scores.
            result: the weights.
            advantages_BT: after weighting.
            update: number of the update in the step.
        """
        self._watched = None
        with self.steps.writer.attempt():
            of_run = [not tag.get("is_padding", False) for tag in batch.tags]
            chosen = self.steps.choose(step.number, update, step.groups, of_run)
            if not chosen:
                return
            keys = [step.keys[row] for row in chosen]
            fetched = tq.kv_batch_get(keys=keys, partition_id=step.partition_id, select_fields=list(FIELDS))
            signal = step.settings.signal
            rows = StepRows(
                method=step.settings.method,
                signal=signal,
                keys=step.keys,
                groups=step.groups,
                prompts=step.prompts,
                responses=step.responses,
                generated=step.generated,
                spans=step.spans,
                truncated_B=step.truncated_B,
                no_scores=reasons_without_scores(
                    signal,
                    step.selection,
                    valid_B=step.batch.valid_B,
                    advantages_B=step.batch.advantages_B,
                    truncated_B=step.truncated_B,
                    non_finite_B=result.non_finite_B,
                ),
                mask_BT=step.batch.mask_BT,
                scores_BT=torch.full_like(advantages_BT, float("nan")) if scores_BT is None else scores_BT,
                weights_BT=result.weights_BT,
                base_advantages_BT=step.base_advantages_BT,
                advantages_BT=advantages_BT,
                rows_in_step=sum(of_run),
            )
            self.steps.write(
                step.number, update, chosen, rows.subset(chosen), lambda: _known(fetched, len(chosen), signal)
            )
            if self._reads_received:
                self._watched = Written(update, chosen, keys, advantages_BT[chosen], step.batch.mask_BT[chosen])

    def watch(self, step: Step, batch: KVBatchMeta) -> bool:
        """Have the workers read what the responses receive that were written last; whether they will.

        Args:
            step: the responses.
            batch: of the update; gets a field and a setting.
        """
        if self._watched is None:
            return False
        with self.steps.writer.attempt():
            watch_request(batch, step.keys, self._watched.places, self._watched.number(step))
            return True
        return False

    def receive(
        self, step: Step, batch: KVBatchMeta, workers: Any, sent: Sequence[int], *, on_policy: bool
    ) -> dict[str, float]:
        """Hand what the responses received in the update to the writer.

        Args:
            step: the responses.
            batch: of the update, whose field and setting are dropped.
            workers: the actor's worker group.
            sent: tokens of each response that went into the update.
            on_policy: whether the old log-probabilities are those of the policy before the update.

        Returns:
            Metrics.
        """
        written, self._watched = self._watched, None
        without_watch(batch)
        with self.steps.writer.attempt():
            replies = workers.take_received(written.number(step))
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            of_ranks = [reply for reply in replies if reply is not None]
            loss = loss_of(step.settings)
            receipt = receipt_of(
                written,
                fetch_loss_columns(written.keys, step.partition_id, written.mask_BT.shape[1]),
                of_ranks,
                sent=sent,
                tokens=step.batch.mask_BT.sum(dim=1).tolist(),
                loss=loss,
                epochs=step.settings[f"{ACTOR}.ppo_epochs"],
                on_policy=on_policy,
            )
            lengths = [len(step.responses[place]) for place in written.places]
            header = self.steps.write_received(
                step.number, written.update, written.keys, lengths, written.mask_BT, receipt, loss.name
            )
            clipped = {} if header.clipped is None else {"receipt/clipped": header.clipped}
            return {"receipt/findings": sum(finding.mismatch for finding in receipt.findings), **clipped}
        return {}


def _known(fetched: TensorDict, count: int, signal: Signal) -> list[dict[str, Any]]:
    """Each response's values in TransferQueue, by the names of the dump's columns; ``None`` for one that is not there."""
    names = ("reward_model", "extra_fields", "data_source", "extra_info")
    judged, extra, sources, infos = (objects(fetched, name, count) for name in names)
    rewards = [None if values is None else float(values.sum()) for values in _unbound(fetched, "rm_scores", count)]
    columns = {
        target: [None if values is None else values.detach().float().cpu().numpy().copy() for values in unbound]
        for target, unbound in (
            ("old_log_prob_T", _unbound(fetched, OLD_LOG_PROBS, count)),
            ("entropy_T", _unbound(fetched, ENTROPY, count)),
        )
    }
    known = []
    for row, (reward, source) in enumerate(zip(rewards, sources, strict=True)):
        truth, index = _entry(judged[row], "ground_truth"), _entry(infos[row], "index")
        accuracy = _entry(_entry(extra[row], "reward_extra_info"), "acc")  # the reward function's own verdict
        known.append(
            {
                "ground_truth": None if truth is None else str(truth),
                "reward": reward if reward is None or math.isfinite(reward) else None,
                "outcome": outcome_of(reward if accuracy is None else float(accuracy)),
                "id": f"{source}/{index}" if source is not None and index is not None else None,
                "labels": turn_rewards_label(extra[row], signal),
                **{target: values[row] for target, values in columns.items() if values[row] is not None},
            }
        )
    return known


def turn_rewards_label(extra: Any, signal: Signal) -> dict[str, list[float]]:
    """The rewards by turn as a label: those that the method reads, else the first of the usual names that has any."""
    names = (getattr(signal, "rewards", None) or None, *TURN_REWARDS)
    for known in (
        _entry(values, name) for name in names if name for values in (_entry(extra, "reward_extra_info"), extra)
    ):
        if isinstance(known, list | tuple) and known and all(isinstance(reward, int | float) for reward in known):
            return {"turn_rewards": [float(reward) for reward in known]}
    return {}


def _unbound(fetched: TensorDict, name: str, count: int) -> list[torch.Tensor | None]:
    return list(fetched[name].unbind()) if name in fetched.keys() else [None] * count  # noqa: SIM118


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
