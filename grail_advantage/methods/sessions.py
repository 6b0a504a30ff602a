"""Credit by turn: every turn gets an advantage of its own, of either sign. A *turn* is a maximal run of tokens that the
model wrote; what a tool or a user said is between two turns. A *session* is one conversation: one response, or several
whose turns follow each other; its outcome, the reward of its last response, counts once. docs/turns.md says which
methods are biased.

A method has one function, :meth:`TurnMethod.advantages`. Shape: K turns of one session."""

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grail_advantage.data import OLD_LOG_PROBS, Rollouts, runs, within_range
from grail_advantage.method import AdvantageMethod, option
from grail_advantage.methods.turn_rewards import UncertainError, rewards_by_turn

logger = logging.getLogger(__name__)
Turn = tuple[int, int, int]  # response, first token and end


@dataclass
class Session:
    """The turns of one session, as a method sees them."""

    # The host's name for it, for messages
    key: str
    # The same for sessions of one prompt
    group: Hashable
    outcome: float
    # For rewards_by_turn(): lists of rewards, how many turns each is for, and what a flat one holds
    lists: Sequence[Any]
    counts: Sequence[int]
    align: str
    # With turn_advantages() row, number of the turn in it, and the next number
    turns: Sequence[Turn]
    # What was said before each turn, as token ids; of a method that reads "messages"
    before: Sequence[Hashable] = ()
    # float32, of each turn's tokens; of a method that reads "old_log_probs"
    log_probs: Sequence[np.ndarray] = ()
    # Those read: one value for each response
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # float64 (K,); by turn, without the outcome
    rewards: np.ndarray = field(init=False)

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
        return [*names, self.rewards] if self.rewards else names

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        """Of the turns of one prompt's sessions, float (K,) each."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def compare(
        self, sessions: Iterable[Session], where: str
    ) -> tuple[list[tuple[Session, np.ndarray]], list[str]]:
        """Each session with its advantages, and why some cannot be compared, whose advantages are NaN. ValueError: the
        rewards of a session do not fit its turns. Messages begin with ``where``, and name the session."""
        compared = []
        reasons = []
        groups: dict[Hashable, list[Session]] = defaultdict(list)
        for session in sessions:
            try:
                if not within_range(session.outcome):
                    raise UncertainError(
                        f"has the outcome {session.outcome}, which is not finite or too large"
                    )
                session.rewards = rewards_by_turn(
                    session.lists, session.counts, session.align, differences=self.differences
                )
            except UncertainError as reason:
                reasons.append(f"{where} {session.key} {reason}")
                compared.append((session, np.full(len(session.turns), np.nan)))
            except ValueError as error:
                raise ValueError(f"{where} {session.key} {error}") from None
            else:
                groups[session.group].append(session)
        for members in groups.values():
            compared += zip(members, self.advantages(members), strict=True)
        return compared, reasons

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
            logger.warning("%s: %d sessions train nothing. %s", self.name, len(reasons), reasons[0])
        return scores

    def _scores(self, r: Rollouts) -> tuple[Tensor, list[str]]:
        """float64 (B, T), and why sessions train nothing."""
        scores = torch.zeros_like(r.mask, dtype=torch.float64)
        compared, reasons = self.compare(
            self._sessions(r), f"{self.section}.rewards={self.rewards}: response"
        )
        for session, advantages in compared:
            for (index, start, stop), advantage in zip(session.turns, advantages, strict=True):
                scores[index, start:stop] = float(advantage)
        return scores, reasons

    def _sessions(self, r: Rollouts) -> Iterator[Session]:
        """Those in which the model took a turn."""
        assert r.groups is not None and r.rewards is not None  # it reads them
        written = (r.tokens >= 0).numpy()
        log_probs = r.columns.get(OLD_LOG_PROBS)
        for indices in r.conversations:
            turns_of = [[(index, *run) for run in runs(written[index])] for index in indices]
            turns = list(chain(*turns_of))
            if not turns:
                continue
            last = indices[-1]
            fields = {
                name: [r.fields[name][index] for index in indices] for name in self.field_names
            }
            log_probs_of_turns = []
            if log_probs is not None:
                log_probs_of_turns = [
                    log_probs[index, start:stop].float().numpy() for index, start, stop in turns
                ]
            yield Session(
                key=r.keys[last],
                group=int(r.groups[last]),
                outcome=float(r.rewards[last]),
                # Without a field no turn has a reward, and the outcome alone counts.
                lists=fields.get(self.rewards, [[[]] * len(turns)]),
                counts=list(map(len, turns_of)),
                align=self.align,
                turns=turns,
                before=_before(r, turns_of) if "messages" in self.reads else (),
                log_probs=log_probs_of_turns,
                fields=fields,
            )


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
