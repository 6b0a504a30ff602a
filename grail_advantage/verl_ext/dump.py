"""The responses of an update of the actor for the token dump (:mod:`grail_advantage.dump`).

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same responses by the same
keys, in its column ``uid``.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerBase

from grail_advantage.data import DUMPED, ENTROPY, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, Weighed, outcome_of, runs
from grail_advantage.dump import StepDump, tolerant
from grail_advantage.method import Method
from grail_advantage.methods.turns import list_a_turn, rewards_label
from grail_advantage.verl_ext.received import (
    Written,
    fetch_loss_columns,
    loss_of,
    receipt_of,
    watch_request,
    without_watch,
)
from grail_advantage.verl_ext.rules import STRATEGY
from grail_advantage.verl_ext.settings import ACTOR, CALL_REWARDS, ENGINES, MODEL, ROLLOUT, TOOL_REWARDS, Settings
from grail_advantage.verl_ext.step import UpdateBatch, objects

FIELDS = (
    "rm_scores",
    "reward_model",
    "extra_fields",
    "data_source",
    "extra_info",
    OLD_LOG_PROBS,
    ENTROPY,
    ROLLOUT_LOG_PROBS,
)
"""Fields of TransferQueue for the written responses; it leaves out those that a run does not have."""
TURN_REWARDS = ("turn_rewards", CALL_REWARDS, "turn_scores", TOOL_REWARDS)
"""Fields with rewards by turn, of the reward function and of verl's agent loop."""


class UpdateDump:
    """Writes the responses of updates, from the trainer's process. An error in it does not stop the training.

    Args:
        settings: the run's, with a folder for the dump.
        updates: updates of the actor in a step.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerBase, *, updates: int) -> None:
        options = settings.dump
        self._reads_received = options.received and settings[STRATEGY] in ENGINES
        self._watched: Written | None = None
        self._one_reward_a_turn = bool(settings.one_reward_a_turn)
        options.folder.mkdir(parents=True, exist_ok=True)
        self.steps = StepDump(
            options,
            tokenizer,
            updates=updates,
            model=str(settings[f"{MODEL}.path"]),
            temperature=float(settings[f"{ROLLOUT}.temperature"]),
        )
        """Chooses the responses, and writes their files."""

    def write(self, weighed: Weighed, batch: KVBatchMeta, *, update: int) -> None:
        """Hand the update's responses to the writer.

        Args:
            weighed: of the update.
            batch: keys and tags of its responses.
            update: number of the update in the step.
        """
        self._watched = None
        with self.steps.attempt():
            rollouts = weighed.rollouts
            of_run = [not tag.get("is_padding", False) for tag in batch.tags]
            chosen = self.steps.choose(rollouts.step, update, rollouts.groups.tolist(), of_run)
            if not chosen:
                return
            part = weighed.part(chosen)
            keys = list(part.rollouts.keys)
            fetched = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
            parts = [_with_facts(part, fetched, self._one_reward_a_turn)]
            self.steps.write(rollouts.step, update, parts, sum(of_run))
            if self._reads_received:
                self._watched = Written(update, chosen, keys, part.advantages, part.rollouts.mask)

    def watch(self, step: UpdateBatch, batch: KVBatchMeta) -> bool:
        """Have the workers read what the responses receive that were written last; whether they will.

        Args:
            batch: of the update; gets a field and a setting.
        """
        if self._watched is None:
            return False
        with self.steps.attempt():
            watch_request(batch, step.keys, self._watched.places, self._watched.number(step))
            return True
        return False

    def receive(
        self, step: UpdateBatch, batch: KVBatchMeta, workers: Any, sent: Sequence[int], *, on_policy: bool
    ) -> dict[str, float]:
        """Hand what the responses received in the update to the writer.

        Args:
            batch: of the update, whose field and setting are dropped.
            workers: the actor's worker group.
            sent: tokens of each response that went into the update.
            on_policy: whether the old log-probabilities are those of the policy before the update.

        Returns:
            Metrics.
        """
        written, self._watched = self._watched, None
        without_watch(batch)
        with self.steps.attempt():
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
                tokens=step.rollouts.mask.sum(dim=1).tolist(),
                loss=loss,
                epochs=step.settings[f"{ACTOR}.ppo_epochs"],
                on_policy=on_policy,
            )
            lengths = [len(step.rollouts.responses[place]) for place in written.places]
            self.steps.write_received(step.rollouts.step, written.update, receipt, loss.name, written.keys, lengths)
            clipped = {} if receipt.clipped is None else {"receipt/clipped": receipt.clipped}
            return {"receipt/findings": sum(finding.mismatch for finding in receipt.findings), **clipped}
        return {}


def _with_facts(weighed: Weighed, fetched: TensorDict, one_reward_a_turn: bool) -> Weighed:
    """The record with its responses' values in TransferQueue, as far as the run has them.

    Args:
        one_reward_a_turn: whether that is certain of as many rewards as turns.
    """
    r, method, count = weighed.rollouts, weighed.method, len(weighed.rollouts)
    names = ("reward_model", "extra_fields", "data_source", "extra_info")
    judged, extra, sources, infos = (objects(fetched, name) or [None] * count for name in names)
    sums = [float(values.sum()) for values in fetched["rm_scores"].unbind()] if "rm_scores" in fetched.keys() else []  # noqa: SIM118
    rewards = [reward if math.isfinite(reward) else None for reward in sums] or [None] * count
    # The reward function's own verdict goes first.
    verdicts = [_entry(_entry(entry, "reward_extra_info"), "acc") for entry in extra]
    truths = [_entry(entry, "ground_truth") for entry in judged]
    numbers = [_entry(entry, "index") for entry in infos]
    turns = [len(runs(written)) if one_reward_a_turn else 0 for written in r.written.numpy()]
    facts = {
        "ground_truth": [None if truth is None else tolerant(str, truth) for truth in truths],
        "reward": rewards,
        "outcome": [
            outcome_of(reward if verdict is None else tolerant(float, verdict))
            for reward, verdict in zip(rewards, verdicts, strict=True)
        ],
        "id": [
            None if any(part is None for part in of_row) else tolerant("{0[0]}/{0[1]}".format, of_row)
            for of_row in zip(sources, numbers, strict=True)
        ],
        "labels": [
            tolerant(partial(turn_rewards_label, method=method, before=before, turns=of_row), entry) or {}
            for entry, before, of_row in zip(extra, r.turns_before, turns, strict=True)
        ],
    }
    columns = {
        name: pad_sequence([values.detach().float().cpu() for values in fetched[name].unbind()], batch_first=True)
        for name in (*DUMPED, ROLLOUT_LOG_PROBS)
        if name in fetched.keys()  # noqa: SIM118  # a TensorDict has no `in`
    }
    return replace(weighed, rollouts=replace(r, facts=facts, columns=columns))


def turn_rewards_label(extra: Any, method: Method, before: int = 0, turns: int = 0) -> dict[str, list[Any]]:
    """The rewards by turn as a label: those that the method reads, else the first of the usual names that has any.

    Args:
        extra: what verl has of the response.
        method: of the run.
        before: turns of its session before the response; a list of the reward function is the whole session's.
        turns: of the response where as many rewards are certain to be one each, else 0.
    """
    own = getattr(method, "rewards", None)
    for name in (own or None, *TURN_REWARDS):
        for begin, of in ((before, _entry(extra, "reward_extra_info")), (0, extra)):
            known = _entry(of, name) if name else None
            if label := rewards_label(list_a_turn(known, turns))[begin:]:
                return {"turn_rewards": label}
            if known is not None and name == own:
                return {}
    return {}


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
