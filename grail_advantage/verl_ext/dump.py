"""The responses of an update of the actor for the token dump (:mod:`grail_advantage.dump`).

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same responses by the
same keys, in its column ``uid``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from grail_advantage.data import OLD_LOG_PROBS, Rollouts, Weighed, outcome_of, runs
from grail_advantage.dump import StepDump, received_table, tolerant
from grail_advantage.effect import effect_figures
from grail_advantage.method import Method
from grail_advantage.methods.turns import list_a_turn, rewards_label
from grail_advantage.receipt.report import record_of
from grail_advantage.verl_ext.received import LOSS_COLUMNS, Written, loss_of, receipt_of
from grail_advantage.verl_ext.settings import (
    ACTOR,
    CALL_REWARDS,
    ENGINES,
    MODEL,
    ROLLOUT,
    STRATEGY,
    TOOL_REWARDS,
    Settings,
)
from grail_advantage.verl_ext.step import REWARDS, columns_of, objects

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
        self._settings = settings
        self.watched: Written | None = None
        """The responses that were written last, whose update the workers are to watch."""
        options.folder.mkdir(parents=True, exist_ok=True)
        self.steps = StepDump(
            options,
            tokenizer,
            updates=updates,
            model=str(settings[f"{MODEL}.path"]),
            temperature=float(settings[f"{ROLLOUT}.temperature"]),
        )
        """Chooses the responses, and writes their files."""

    def write(self, weighed: Weighed, data: TensorDict, of_run: Sequence[bool], *, update: int) -> None:
        """Hand the update's responses to the writer.

        Args:
            weighed: of the update.
            data: what was fetched of them.
            of_run: which of its responses do not only fill up the batch.
            update: number of the update in the step.
        """
        self.watched = None
        with self.steps.attempt():
            rollouts = weighed.rollouts
            chosen = self.steps.choose(rollouts.step, update, rollouts.groups.tolist(), of_run)
            if not chosen:
                return
            one_a_turn = bool(self._settings.one_reward_a_turn)
            part = replace(weighed, rollouts=_with_facts(weighed, data, chosen, one_a_turn)).part(chosen)
            self.steps.write(rollouts.step, update, [part], sum(of_run))
            if self._settings.dump.received and self._settings[STRATEGY] in ENGINES:
                columns, width = columns_of(data, LOSS_COLUMNS), part.advantages.shape[1]
                columns = {name: values_BT[chosen, :width] for name, values_BT in columns.items()}
                self.watched = Written(f"{rollouts.step}.{update}", update, chosen, part, columns)

    def receive(
        self,
        rollouts: Rollouts,
        workers: Any,
        sent: Sequence[bool],
        log_probs_now: Callable[[Sequence[int]], torch.Tensor],
        *,
        on_policy: bool,
    ) -> dict[str, float]:
        """Hand what the responses received in the update, and in some steps its effect, to the writer.

        Args:
            rollouts: all responses of the update.
            workers: the actor's worker group.
            sent: which responses went into the update.
            log_probs_now: log-probabilities (B, T) of the responses at some places, by the actor as it is.
            on_policy: whether the old log-probabilities are those of the policy before the update.

        Returns:
            Metrics.
        """
        written, self.watched = self.watched, None
        with self.steps.attempt():
            replies = workers.take_received(written.number)
            if errors := [reply for reply in replies if isinstance(reply, Exception)]:
                raise errors[0]
            loss = loss_of(self._settings)
            receipt = receipt_of(
                written,
                [reply for reply in replies if reply is not None],
                sent=sent,
                tokens=rollouts.mask.sum(dim=1).tolist(),
                loss=loss,
                epochs=self._settings[f"{ACTOR}.ppo_epochs"],
                on_policy=on_policy,
            )
            r = written.part.rollouts
            lengths = [len(response) for response in r.responses]
            metrics = {"receipt/findings": sum(finding.mismatch for finding in receipt.findings)}
            metrics |= {} if receipt.clipped is None else {"receipt/clipped": receipt.clipped}
            effect = None
            if self.steps.measures(r.step):
                now = log_probs_now(written.places)[:, : r.mask.shape[1]]
                effect = now - written.columns[OLD_LOG_PROBS]
                figures = effect_figures(written.part.advantages, effect, r.mask)
                metrics |= {f"{written.part.method.name}/{name}": value for name, value in figures.items()}
            header = record_of(receipt, loss.name, r.step, written.update)
            self.steps.write_received(header, received_table(receipt, r.keys, lengths, effect))
            return metrics
        return {}


def _with_facts(weighed: Weighed, data: TensorDict, chosen: Sequence[int], one_reward_a_turn: bool) -> Rollouts:
    """The responses with the facts of those chosen, as far as the run has them; ``None`` of the others.

    Args:
        one_reward_a_turn: whether that is certain of as many rewards as turns.
    """
    r = weighed.rollouts
    written, before = r.written.numpy(), r.turns_before
    names = ("reward_model", "extra_fields", "data_source", "extra_info")
    judged, extra, sources, infos = (objects(data, name) or [None] * len(r) for name in names)
    sums_B = columns_of(data, [REWARDS]).get(REWARDS, torch.full((len(r), 1), torch.nan)).sum(dim=1)
    rewards = [reward if math.isfinite(reward) else None for reward in sums_B.tolist()]
    facts: dict[str, list[Any]] = {
        name: [None] * len(r) for name in ("ground_truth", "reward", "outcome", "id", "labels")
    }
    for place in chosen:
        # The reward function's own verdict goes first.
        verdict = _entry(_entry(extra[place], "reward_extra_info"), "acc")
        truth, number = _entry(judged[place], "ground_truth"), _entry(infos[place], "index")
        named = sources[place] is not None and number is not None
        turns = len(runs(written[place])) if one_reward_a_turn else 0
        label = partial(turn_rewards_label, method=weighed.method, before=before[place], turns=turns)
        of = {
            "ground_truth": None if truth is None else tolerant(str, truth),
            "reward": rewards[place],
            "outcome": outcome_of(rewards[place] if verdict is None else tolerant(float, verdict)),
            "id": tolerant("{0[0]}/{0[1]}".format, (sources[place], number)) if named else None,
            "labels": tolerant(label, extra[place]) or {},
        }
        for name, value in of.items():
            facts[name][place] = value
    return replace(r, facts=facts)


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
