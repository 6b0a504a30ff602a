"""Turns of a session, their rewards, and the base of the methods that give every turn an advantage of its own.

A *turn* is a maximal run of tokens that the model wrote. What a tool or a user said is between two turns and trains
nothing. Turns are found among all tokens that the model wrote, also those that a rollout correction drops from training.

A *session* is one conversation. It is one response, or several whose turns follow each other, as where the context was
compressed. Its outcome, the reward of its last response, counts once.

A method derives from :class:`TurnSignal` and has one function, :meth:`TurnSignal.turn_advantages`: the advantages of the turns
of one prompt's sessions.

Shape suffixes: B responses, T response tokens, K turns of one session.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from grail_advantage.batch import (
    GROUPS,
    OLD_LOG_PROBS,
    REWARDS,
    SESSIONS,
    TOKENS,
    RolloutBatch,
    within_range,
)
from grail_advantage.options import option
from grail_advantage.signals.base import MaskTruncated, RowSelection, Signal

Gamma = Annotated[
    float, Field(ge=0, le=1, description="discount from one turn to the next in the return of a turn; 0 to 1")
]
Deviation = Annotated[
    bool,
    Field(
        description="whether differences from a mean are divided by the deviation of what it was taken over, as in GRPO"
    ),
]
Align = Literal["calls", "turns"]
BIAS_OF_DISCOUNT = (
    "returns are discounted, which biases the gradient of the mean reward: by 0.10 of its length with 0.9 and 0.42 with 0.5, "
    "beside a smaller scale, in an environment that was enumerated (docs/turns.md)"
)
BIAS_OF_MASKING = (
    "the policy decides with its turns which responses are cut off and train nothing, which biases the gradient: by 0.27 of "
    "its length with the answers to 20 % of calls cut off, in an environment that was enumerated (docs/turns.md)"
)
logger = logging.getLogger(__name__)


class Turn(NamedTuple):
    """The tokens of a turn."""

    row: int
    """Of its response in the batch."""
    start: int
    """Of the half-open range of its tokens in the response."""
    stop: int


@dataclass(frozen=True)
class Turns:
    """The turns of one session, as a method sees them."""

    key: str
    """The host's name for it, for messages."""
    outcome: float
    """The session's reward."""
    rewards_K: np.ndarray
    """float64; the rewards by turn, without the outcome."""
    before: Sequence[Hashable] = ()
    """What a tool or a user said before each turn, as token ids; nothing before the first, which follows the prompt. Empty
    unless the method reads ``MESSAGES``."""
    turns: Sequence[Turn] = ()
    """Their tokens; empty where there are none, as for :func:`grail_advantage.turn_advantages`."""
    log_probs: Sequence[np.ndarray] = ()
    """float32; of each turn's tokens under the policy before the update. Empty unless the method reads ``OLD_LOG_PROBS``."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The fields that the method reads, by name: one value for each response of the session."""

    def returns_K(self, gamma: float, *, outcome: bool) -> np.ndarray:
        """The return of each turn, float64: its reward and the discounted ones of the turns after it.

        Args:
            gamma: discount from one turn to the next.
            outcome: whether the session's reward counts, with the last turn's.
        """
        returns_K = self.rewards_K.copy()
        returns_K[-1] += self.outcome if outcome else 0.0
        for turn in range(len(returns_K) - 2, -1, -1):
            returns_K[turn] += gamma * returns_K[turn + 1]
        return returns_K


def compare(
    values: Sequence[np.ndarray], keys: Sequence[Sequence[Any]], *, deviation: bool, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """Values of turns less the mean of those with the same key; 0 for a key of only one turn.

    Args:
        values: float (K,) for each session.
        keys: what each of these turns is compared under, such as its place.
        deviation: whether to divide by the deviation, with n - 1, plus ``epsilon``, as verl's GRPO does it.
    """
    alike: dict[Any, list[float]] = defaultdict(list)
    for values_K, keys_K in zip(values, keys, strict=True):
        for value, key in zip(values_K, keys_K, strict=True):
            alike[key].append(value)
    means = {key: np.mean(of) for key, of in alike.items()}
    spreads = {key: np.std(of, ddof=1) + epsilon if deviation and len(of) > 1 else 1.0 for key, of in alike.items()}
    return [
        np.array([(value - means[key]) / spreads[key] for value, key in zip(values_K, keys_K, strict=True)])
        for values_K, keys_K in zip(values, keys, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------- rewards by turn


class UncertainError(ValueError):
    """A session that cannot be compared with others; the message says why."""


def check_outcome(outcome: float) -> None:
    """UncertainError for a session's reward that is not finite or too large."""
    if not within_range(np.float64(outcome)):
        raise UncertainError(f"has the outcome {outcome}, which is not finite or too large")


def rewards_by_turn(
    lists: Sequence[Any], turns: Sequence[int], align: Align = "turns", *, differences: bool = False
) -> np.ndarray:
    """The rewards of a session's turns.

    Example: for one response of three turns ``[[0.5, None, [1, 1]]]`` gives ``[0.5, 0, 2]``: the second turn has no reward, the
    third made two calls. With ``differences`` ``[[0.2, None, 0.5]]`` gives ``[0.2, 0, 0.3]``.

    Args:
        lists: one for each response of the session, of its own turns; where the last response alone has one that is not
            ``None``, the whole session's. A list has a number, ``None``, or a list of these for the calls of a turn.
        turns: of each response.
        align: what a list without lists in it holds, see :attr:`TurnSignal.align`.
        differences: whether the numbers are scores of the state after a turn, of which the differences are the rewards.

    Returns:
        float64 (K,).

    Raises:
        UncertainError: a number that is not finite, or one of no certain turn.
        ValueError: something else than such a list, or one of another length.
    """
    if all(one is None for one in lists[:-1]):
        lists, turns = lists[-1:], [sum(turns)]
    calls = [of for one, count in zip(lists, turns, strict=True) for of in _calls(one, count, align)]
    if not differences:
        return np.array([sum(of_turn) for of_turn in calls], dtype=np.float64)
    scores = [0.0]
    for of_turn in calls:
        scores.append(of_turn[-1] if of_turn else scores[-1])
    return np.diff(scores)


def calls_of(given: Any) -> list[list[float]]:
    """The numbers of each entry of a list of rewards, fewer where there is no reward; the errors are those of
    :func:`rewards_by_turn`."""
    entries = given.tolist() if isinstance(given, np.ndarray) else [] if given is None else given
    if not isinstance(entries, list | tuple):
        raise ValueError(f"has {given!r}; give it a list with a number, None or a list of numbers for each turn")
    return [_numbers(entry) for entry in entries]


def rewards_label(given: Any) -> list[Any]:
    """A list of rewards for the dump's label ``turn_rewards``: numbers, ``None``, and lists of the numbers of a turn's calls;
    empty where it is no such list."""
    try:
        calls = calls_of(given)
    except ValueError:
        return []
    if _has_lists(given):
        return calls
    return [of_turn[0] if of_turn else None for of_turn in calls]


def list_a_turn(given: Any, turns: int) -> Any:
    """A flat list of as many rewards as turns, as a list for each turn: ``[0.5, 1]`` of two turns is ``[[0.5], [1]]``. Anything
    else as it is.

    For a host in which no turn makes two calls: these rewards are one each, and the last turn's call has no answer, as where
    verl's tool agent loop lists a call's reward and then finds no room for what the tool said.
    """
    entries = given.tolist() if isinstance(given, np.ndarray) else given
    flat = isinstance(entries, list | tuple) and not _has_lists(entries)
    return [[one] for one in entries] if flat and len(entries) == turns else given


def _calls(given: Any, turns: int, align: Align) -> list[list[float]]:
    """The numbers of each turn of one list."""
    calls = calls_of(given)
    flat = not _has_lists(given)
    if align == "calls" and flat and turns == 1:
        calls = [[one for of_call in calls for one in of_call]]  # there is no other turn
    elif align == "calls" and flat and len(calls) >= turns:
        raise UncertainError(
            f"has {turns} turns and the {len(calls)} rewards {given!r}, by two calls in one turn or a last call without an "
            "answer, so that it is not certain which turn each belongs to; give a list for each turn, such as [[1, 0.5], [0]], "
            "or with align=turns one number for each"
        )
    fits = (turns,) if align == "turns" and flat else (turns - 1, turns)
    if len(calls) not in fits:
        raise ValueError(
            f"has {turns} turns and the {len(calls)} rewards {given!r}, where align={align} wants "
            f"{' or '.join(map(str, fits))}; with turns it is one a turn, with calls one for each turn that a tool answered, "
            "and with rewards='' the outcome counts alone"
        )
    return calls + [[]] * (turns - len(calls))


def _has_lists(given: Any) -> bool:
    """Whether a list of rewards has one for the calls of a turn."""
    return given is not None and any(isinstance(entry, list | tuple | np.ndarray) for entry in given)


def _numbers(entry: Any) -> list[float]:
    """The numbers of an entry, which are fewer where there is no reward."""
    entries = entry.tolist() if isinstance(entry, np.ndarray) else entry
    found = [one for one in (entries if isinstance(entries, list | tuple) else [entries]) if one is not None]
    if not all(isinstance(one, int | float | np.number) for one in found):
        raise ValueError(f"has the reward {entry!r}; give a number, None or a list of numbers for each turn")
    if not within_range(np.array(found, dtype=np.float64)).all():
        raise UncertainError(f"has the reward {entry!r}, which is not finite or too large")
    return list(map(float, found))


# --------------------------------------------------------------------------------------------------------------- the methods


class TurnSignal(Signal):
    """Base of the methods that give every turn an advantage of its own: token advantages of either sign."""

    reads = frozenset({GROUPS, TOKENS, REWARDS, SESSIONS})
    gives = "advantages"
    without_scores = "nothing"

    rewards: str = option(
        "tool_rewards",
        "field of the batch with each response's list of rewards by turn: from the reward function, the agent loop or the "
        "data; empty for none, so that only the outcome counts",
    )

    align: Align = option(
        "calls",
        "how many rewards a response with K turns brings. turns: K. calls: one for each tool call, so K - 1 if each turn but "
        "the last makes one. With 3 turns, 3 or more rewards are ambiguous (two calls in a turn, or a last call without an "
        "answer), and the response trains nothing; with 1 turn, a list for each turn's calls, or 3 rewards in verl's own agent "
        "loop with max_parallel_calls=1, nothing is ambiguous",
    )

    differences: bool = option(
        False,
        "whether the list holds scores of the state after each turn, of which the differences are the rewards: [0.2, 0.5] is "
        "0.2 and 0.3",
    )

    mask_truncated: MaskTruncated = False  # it biases the gradient where the policy decides when to stop

    outcome: bool = option(True, "whether the response's own reward counts, with its last turn")

    @property
    def field_names(self) -> list[str]:
        return [*super().field_names, *([self.rewards] if self.rewards else [])]

    def turn_advantages(self, sessions: Sequence[Turns]) -> list[np.ndarray]:
        """The advantages of the turns of one prompt's sessions, float (K,) each."""
        raise NotImplementedError(f"{type(self).__name__} has no turn_advantages()")

    def by_groups(self, members: Sequence[tuple[Hashable, Turns]]) -> list[np.ndarray]:
        """The advantages of the turns of sessions that come with their groups, float (K,) each."""
        of_groups: dict[Hashable, list[int]] = defaultdict(list)
        for place, (group, _) in enumerate(members):
            of_groups[group].append(place)
        found = [np.zeros(0)] * len(members)
        for places in of_groups.values():
            advantages = self.turn_advantages([members[place][1] for place in places])
            for place, of_turns_K in zip(places, advantages, strict=True):
                found[place] = of_turns_K
        return found

    def select(self, batch: RolloutBatch) -> RowSelection:
        """All responses that train, but those whose advantages are all 0."""
        selection = super().select(batch)
        if OLD_LOG_PROBS in self.reads:  # they come after the selection
            return replace(selection, selected_B=batch.trains_B)
        scores_BT, _ = self._scores(batch)
        matters_B = (batch.advantages_B != 0) | (scores_BT != 0).any(dim=1)
        return replace(selection, selected_B=batch.trains_B & matters_B)

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """The token advantages; NaN in a session with a reward that is not finite, or one of no certain turn: it is compared
        with no other session, and trains nothing."""
        scores_BT, out = self._scores(batch)
        for key, reason in list(out.items())[:1]:
            logger.warning(
                "%s: %d sessions train nothing. %s.rewards=%s: response %s %s",
                *(self.name, len(out), self.section, self.rewards, key, reason),
            )
        return scores_BT

    def _scores(self, batch: RolloutBatch) -> tuple[torch.Tensor, dict[str, str]]:
        """The token advantages, and why sessions have none, by their keys."""
        assert (
            batch.tokens_BT is not None and batch.groups_B is not None and batch.rewards_B is not None
        )  # it reads them
        scores_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
        members: list[tuple[Hashable, Turns]] = []
        out: dict[str, str] = {}
        written_BT, groups, outcomes = (
            (batch.tokens_BT >= 0).cpu().numpy(), batch.groups_B.tolist(), batch.rewards_B.tolist()
        )  # fmt: skip
        for rows in batch.sessions:
            of_rows = [[Turn(row, *edges) for edges in runs(written_BT[row])] for row in rows]
            turns = [turn for of_row in of_rows for turn in of_row]
            if not turns:
                continue
            key = batch.keys[rows[-1]] if batch.keys else f"{rows[-1]} of the batch"
            lists = [batch.fields[self.rewards][row] for row in rows] if self.rewards else [[None] * len(turns)]
            outcome = outcomes[rows[-1]]
            try:
                check_outcome(outcome)
                counts = list(map(len, of_rows)) if self.rewards else [len(turns)]
                align = self.align if self.rewards else "turns"
                rewards_K = rewards_by_turn(lists, counts, align, differences=self.differences)
            except UncertainError as reason:
                out[key] = str(reason)
                scores_BT[rows] = torch.nan
                continue
            except ValueError as error:
                raise ValueError(f"{self.section}.rewards={self.rewards}: response {key} {error}") from None
            known = self._known(batch, rows, turns)
            session = Turns(key, outcome, rewards_K, self._before(batch, of_rows), turns, *known)
            members.append((groups[rows[-1]], session))
        for (_, session), of_turns_K in zip(members, self.by_groups(members), strict=True):
            for turn, advantage in zip(session.turns, of_turns_K, strict=True):
                scores_BT[turn.row, turn.start : turn.stop] = float(advantage)
        return scores_BT.to(batch.mask_BT.device), out

    def _before(self, batch: RolloutBatch, of_rows: Sequence[Sequence[Turn]]) -> list[Hashable]:
        """Of a further response nobody knows the prompt here: its first turn is like no other."""
        if batch.messages_BT is None:
            return []
        observed: list[Hashable] = []
        for place, turns in enumerate(of_rows):
            observed += [f"response {turns[0].row}" if place else ()] * bool(turns)
            observed += [
                tuple(batch.messages_BT[after.row, before.stop : after.start].tolist())
                for before, after in pairwise(turns)
            ]
        return observed

    def _known(
        self, batch: RolloutBatch, rows: Sequence[int], turns: Sequence[Turn]
    ) -> tuple[list[np.ndarray], dict[str, list[Any]]]:
        log_probs_BT = batch.columns_BT.get(OLD_LOG_PROBS)
        of_turns = [] if log_probs_BT is None else [log_probs_BT[row, a:b].float().cpu().numpy() for row, a, b in turns]
        return of_turns, {name: [batch.fields[name][row] for row in rows] for name in self.field_names}


def runs(written_T: np.ndarray) -> list[tuple[int, int]]:
    """The half-open ranges of marked tokens (T,), bool or 1 and 0; of those that the model wrote, its turns."""
    edges = np.diff(np.asarray(written_T, dtype=bool), prepend=False, append=False).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
