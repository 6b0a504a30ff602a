"""Credit by turn: every turn gets an advantage of its own, of either sign. A *turn* is a maximal run of tokens that the
model wrote; what a tool or a user said is between two turns. A *session* is one conversation: one response, or several
whose turns follow each other; its outcome, the reward of its last response, counts once. docs/turns.md says which
methods are biased.

A method has one function, :meth:`TurnMethod.advantages`. Shape: K turns of one session."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grail_advantage.data import OLD_LOG_PROBS, Rollouts, runs, within_range
from grail_advantage.method import AdvantageMethod, option
from grail_advantage.methods.turn_rewards import UncertainError, rewards_by_turn

logger = logging.getLogger(__name__)
Turn = tuple[int, int, int]  # response, first token and end


@dataclass(frozen=True)
class Session:
    """The turns of one session, as a method sees them."""

    key: str  # the host's name for it, for messages
    group: Hashable  # the same for sessions of one prompt
    outcome: float
    rewards: np.ndarray  # float64 (K,); by turn, without the outcome
    # What was said before each turn, as token ids; of a method that reads "messages"
    before: Sequence[Hashable] = ()
    turns: Sequence[Turn] = ()  # none in turn_advantages()
    # float32, of each turn's tokens; of a method that reads "old_log_probs"
    log_probs: Sequence[np.ndarray] = ()
    # Those read: one value for each response
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def returns(self, gamma: float, *, outcome: bool) -> np.ndarray:
        """float64 (K,): each turn's reward and the discounted ones after it; with the outcome, if it counts, in the
        last."""
        g = self.rewards.copy()
        if outcome:
            g[-1] += self.outcome
        # Rewards 0, 1 with the outcome 2 give 1.5, 3 at gamma 0.5.
        for k in range(len(g) - 2, -1, -1):
            g[k] += gamma * g[k + 1]
        return g


class TurnMethod(AdvantageMethod):
    """Base of the methods by turn. A session with a number that is not finite, or one of no certain turn, is compared
    with no other and trains nothing."""

    reads = frozenset({"groups", "tokens", "rewards", "sessions"})
    non_finite_trains = False

    rewards: str = option(
        "tool_rewards",
        "field with each response's rewards by turn (docs/turns.md); empty: only the outcome counts",
    )
    align: Literal["calls", "turns"] = option(
        "calls",
        "rewards of a response. turns: one for each turn; calls: one for each tool call, with exceptions (docs/turns.md)",
    )
    differences: bool = option(
        False, "whether the list holds scores of states, whose differences are the rewards"
    )
    mask_truncated: bool = option(
        False, "as elsewhere; it biases the gradient where the policy decides when to stop"
    )
    outcome: bool = option(True, "whether the response's own reward counts, with its last turn")

    @property
    def field_names(self) -> list[str]:
        names = super().field_names
        if not self.rewards:
            return names
        return [*names, self.rewards]

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        """Of the turns of one prompt's sessions, float (K,) each."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def by_groups(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        """:meth:`advantages` of the sessions of each group, in the order of the sessions."""
        members: dict[Hashable, list[int]] = defaultdict(list)
        for index, session in enumerate(sessions):
            members[session.group].append(index)
        advantages: dict[int, np.ndarray] = {}
        for indices in members.values():
            of_group = self.advantages([sessions[index] for index in indices])
            advantages.update(zip(indices, of_group, strict=True))
        return [advantages[index] for index in range(len(sessions))]

    def select(self, r: Rollouts) -> Tensor:
        """All responses that train, but those whose advantages are all 0."""
        if OLD_LOG_PROBS in self.reads:  # they come after the selection
            return r.trains
        scores, _ = self._scores(r)
        return r.trains & ((r.advantages != 0) | (scores != 0).any(dim=1))

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        """The token advantages; NaN in a session that trains nothing."""
        scores, reasons = self._scores(r)
        if reasons:
            first = f"{self.section}.rewards={self.rewards}: response {reasons[0]}"
            logger.warning("%s: %d sessions train nothing. %s", self.name, len(reasons), first)
        return scores

    def _scores(self, r: Rollouts) -> tuple[Tensor, list[str]]:
        """float64 (B, T), and why sessions train nothing."""
        assert r.groups is not None and r.rewards is not None  # it reads them
        written = (r.tokens >= 0).numpy()
        log_probs = r.columns.get(OLD_LOG_PROBS)
        scores = torch.zeros_like(r.mask, dtype=torch.float64)
        sessions = Sessions(self, f"{self.section}.rewards={self.rewards}: response")
        for indices in r.conversations:
            turns_of = [
                [(index, start, stop) for start, stop in runs(written[index])] for index in indices
            ]
            turns = [turn for of_response in turns_of for turn in of_response]
            if not turns:
                continue
            last = indices[-1]
            # Without a field the outcome alone counts.
            lists: list[Any] = [[None] * len(turns)]
            counts = [len(turns)]
            align = "turns"
            if self.rewards:
                lists = [r.fields[self.rewards][index] for index in indices]
                counts = [len(of_response) for of_response in turns_of]
                align = self.align
            log_probs_of_turns = []
            if log_probs is not None:
                log_probs_of_turns = [
                    log_probs[index, start:stop].float().numpy() for index, start, stop in turns
                ]
            compared = sessions.add(
                key=r.keys[last],
                group=int(r.groups[last]),
                outcome=float(r.rewards[last]),
                lists=lists,
                counts=counts,
                align=align,
                before=_before(r, turns_of) if "messages" in self.reads else (),
                turns=turns,
                log_probs=log_probs_of_turns,
                fields={
                    name: [r.fields[name][index] for index in indices] for name in self.field_names
                },
            )
            if not compared:
                # Not finite, so that the session trains nothing.
                scores[indices] = torch.nan
        for session, advantages in zip(
            sessions.compared, self.by_groups(sessions.compared), strict=True
        ):
            for (index, start, stop), advantage in zip(session.turns, advantages, strict=True):
                scores[index, start:stop] = float(advantage)
        return scores, sessions.reasons


class Sessions:
    """The sessions of a batch that are compared, and why the others are not."""

    def __init__(self, method: TurnMethod, where: str) -> None:
        self.method = method
        self.where = where
        self.compared: list[Session] = []
        self.reasons: list[str] = []

    def add(
        self,
        *,
        key: str,
        group: Hashable,
        outcome: float,
        lists: Sequence[Any],
        counts: Sequence[int],
        align: str,
        **parts: Any,
    ) -> bool:
        """Whether the session is compared, by its lists of rewards and the turns of each of its responses. ValueError,
        naming it: they do not fit."""
        try:
            if not within_range(np.array(outcome, dtype=np.float64)):
                raise UncertainError(f"has the outcome {outcome}, which is not finite or too large")
            rewards = rewards_by_turn(lists, counts, align, differences=self.method.differences)
        except UncertainError as reason:
            self.reasons.append(f"{key} {reason}")
            return False
        except ValueError as error:
            raise ValueError(f"{self.where} {key} {error}") from None
        self.compared.append(Session(key, group, outcome, rewards, **parts))
        return True


def _before(r: Rollouts, turns_of: Sequence[Sequence[Turn]]) -> list[Hashable]:
    """What was said before each turn of a session. Of a further response nobody knows the prompt here: its first turn
    is like no other."""
    messages: list[Hashable] = []
    for number, turns in enumerate(turns_of):
        if turns:
            messages.append(f"response {turns[0][0]}" if number else ())
        for (index, _, end), (_, start, _) in pairwise(turns):
            messages.append(tuple(r.responses[index][end:start].tolist()))
    return messages
