"""Turns of a response, their rewards, and the base of the methods that give every turn an advantage of its own.

A *turn* is a maximal run of tokens that the model wrote. What a tool or a user said is between two turns and trains
nothing. Turns are found among all tokens that the model wrote, also those that a rollout correction drops from training.

A method derives from :class:`TurnSignal` and has one function, :meth:`TurnSignal.turn_advantages`: the advantages of the turns
of one prompt's responses.

Shape suffixes: B responses, T response tokens, K turns of one response.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from grail_advantage.batch import GROUPS, REWARDS, TOKENS, RolloutBatch, within_range
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
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """The turns of one response."""

    place: int
    """Of the response in its batch."""
    outcome: float
    """The response's reward."""
    rewards_K: np.ndarray
    """float64; the rewards by turn alone, without the outcome."""
    before: Sequence[tuple[int, ...]]
    """What a tool or a user said before each turn, as token ids; nothing before the first, which follows the prompt. Empty
    unless the method reads ``MESSAGES``."""

    def returns_K(self, gamma: float, *, outcome: bool) -> np.ndarray:
        """The return of each turn, float64: its reward and the discounted ones of the turns after it.

        Args:
            gamma: discount from one turn to the next.
            outcome: whether the response's reward counts, with the last turn's.
        """
        returns_K = self.rewards_K.copy()
        returns_K[-1] += self.outcome if outcome else 0.0
        for turn in range(len(returns_K) - 2, -1, -1):
            returns_K[turn] += gamma * returns_K[turn + 1]
        return returns_K


def find_turns(written_BT: torch.Tensor) -> torch.Tensor:
    """The turn of every token, counted from 0.

    Args:
        written_BT: bool; the tokens that the model wrote.

    Returns:
        int64 (B, T), -1 for the other tokens.
    """
    before_BT = torch.nn.functional.pad(written_BT[:, :-1], (1, 0))
    return torch.where(written_BT, (written_BT & ~before_BT).cumsum(dim=1) - 1, -1)


def compare(
    values: Sequence[np.ndarray], keys: Sequence[Sequence[Any]], *, deviation: bool, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """Values of turns less the mean of those with the same key; 0 for a key of one turn alone.

    Args:
        values: float (K,) for each response.
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


def shuffle_turns(advantages_BT: torch.Tensor, turn_BT: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The control for every method here: each response's turn advantages, permuted at random among its turns.

    Args:
        advantages_BT: float; the same on all tokens of a turn.
        turn_BT: int64, from :func:`find_turns`.
        generator: on the CPU; draws the permutations.

    Returns:
        Like ``advantages_BT``, 0 outside the turns.
    """
    shuffled_BT = torch.zeros_like(advantages_BT)
    for row, turn_T in enumerate(turn_BT):
        turns = turn_T[turn_T >= 0].unique().tolist()
        for turn, place in zip(turns, torch.randperm(len(turns), generator=generator).tolist(), strict=True):
            shuffled_BT[row, turn_T == turn] = advantages_BT[row, turn_T == turns[place]][0]
    return shuffled_BT


class TurnSignal(Signal):
    """Base of the methods that give every turn an advantage of its own: token advantages of either sign."""

    reads = frozenset({GROUPS, TOKENS, REWARDS})
    gives = "advantages"
    without_scores: ClassVar[Literal["base", "nothing"]] = "nothing"

    rewards: str = option(
        "tool_rewards",
        "field of the batch with each response's list of rewards by turn: from the reward function, the agent loop or the "
        "data; empty for none, so that only the outcome counts",
    )

    align: Literal["calls", "turns"] = option(
        "calls",
        "what the list of a response with K turns holds: with turns K rewards, one a turn; with calls one for each turn that "
        "called a tool, K - 1; K rewards are ambiguous (two calls in a turn, or a last call without an answer), so that such a "
        "response trains nothing, but for a response of one turn",
    )

    mask_truncated: MaskTruncated = False  # it biases the gradient where the policy decides when to stop

    outcome: bool = option(True, "whether the response's own reward counts, with its last turn")

    @property
    def field_names(self) -> list[str]:
        return [*super().field_names, *([self.rewards] if self.rewards else [])]

    def turn_advantages(self, responses: Sequence[Turns]) -> list[np.ndarray]:
        """The advantages of the turns of one prompt's responses, float (K,) each."""
        raise NotImplementedError(f"{type(self).__name__} has no turn_advantages()")

    def select(self, batch: RolloutBatch) -> RowSelection:
        """All responses that train, but those whose advantages are all 0."""
        matters_B = (batch.advantages_B != 0) | (self.scores(batch, None) != 0).any(dim=1)
        return replace(super().select(batch), selected_B=batch.trains_B & matters_B)

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """The token advantages; NaN in a response with an infinite reward, or one of no certain turn: it is compared with no
        other response, and trains nothing."""
        assert batch.tokens_BT is not None and batch.groups_B is not None  # it reads them
        turn_BT = find_turns(batch.tokens_BT >= 0).cpu()
        scores_BT = torch.zeros(turn_BT.shape, dtype=torch.float64)
        of_groups: dict[int, list[Turns]] = defaultdict(list)
        for response, group in zip(self._turns(batch, turn_BT), batch.groups_B.tolist(), strict=True):
            if len(response.rewards_K) and within_range(np.array([response.outcome, *response.rewards_K])).all():
                of_groups[group].append(response)
            elif len(response.rewards_K):
                scores_BT[response.place] = torch.nan
        for responses in of_groups.values():
            for response, of_turns_K in zip(responses, self.turn_advantages(responses), strict=True):
                turn_T = turn_BT[response.place]
                of_turns = torch.as_tensor(of_turns_K, dtype=torch.float64)
                scores_BT[response.place] = torch.where(turn_T >= 0, of_turns[turn_T.clamp(min=0)], 0.0)
        return scores_BT.to(batch.mask_BT.device)

    def _turns(self, batch: RolloutBatch, turn_BT: torch.Tensor) -> list[Turns]:
        assert batch.rewards_B is not None  # it reads them
        messages_BT = batch.messages_BT.cpu().numpy() if batch.messages_BT is not None else None
        fields = batch.fields[self.rewards] if self.rewards else [None] * len(turn_BT)
        counts_B = turn_BT.max(dim=1).values + 1 if turn_BT.shape[1] else torch.zeros(len(turn_BT), dtype=torch.int64)
        return [
            Turns(
                place,
                outcome,
                self._rewards(given, count, place) if self.rewards and count else np.zeros(count),
                said_before(messages_BT[place], turn_BT[place].numpy()) if messages_BT is not None else (),
            )
            for place, (outcome, given, count) in enumerate(
                zip(batch.rewards_B.tolist(), fields, counts_B.tolist(), strict=True)
            )
        ]

    def _rewards(self, given: Any, turns: int, place: int) -> np.ndarray:
        """A response's rewards by turn, float64 (K,): 0 for a turn that was not scored (``None`` or NaN); NaN for all turns
        where it is not certain which turn a reward belongs to.

        Raises:
            ValueError: something else than a list of numbers, or as many as do not fit; naming the response.
        """
        where = f"{self.section}.rewards={self.rewards}: response {place} of the batch"
        try:
            rewards = np.asarray([] if given is None else given, dtype=np.float64)
        except (TypeError, ValueError):
            rewards = np.zeros(())
        if rewards.ndim != 1:
            raise ValueError(f"{where} has {given!r}; give it a list of numbers, one a turn")
        rewards = np.where(np.isnan(rewards), 0.0, rewards)
        fits = (turns,) if self.align == "turns" else (turns - 1, turns)
        if len(rewards) not in fits:
            raise ValueError(
                f"{where} has {turns} turns and {len(rewards)} rewards, where {self.section}.align={self.align} wants "
                f"{' or '.join(map(str, fits))}; with turns it is one a turn, with calls one for each turn that a tool "
                "answered, and with rewards='' the outcome counts alone"
            )
        if self.align == "calls" and len(rewards) == turns > 1:
            _warn_of_ambiguous_rewards(self.section)
            return np.full(turns, np.nan)
        return np.pad(rewards, (0, turns - len(rewards)))


@cache  # once for each method
def _warn_of_ambiguous_rewards(section: str) -> None:
    logger.warning(
        "%s.align=calls: a response of K turns has K rewards, by two calls in one turn or a last call without an answer, so "
        "that it is not certain which turn each belongs to. Such responses train nothing; non_finite_rate counts them. Where "
        "the list has one reward a turn, use %s.align=turns",
        section,
        section,
    )


def said_before(messages_T: np.ndarray, turn_T: np.ndarray) -> list[tuple[int, ...]]:
    """The messages between each turn and the one before it; nothing before the first.

    Args:
        messages_T: token ids of a response, whoever wrote them.
        turn_T: the turn of each token, -1 for those that the model did not write.
    """
    edges = np.diff(turn_T >= 0, prepend=False, append=False).nonzero()[0]  # where turns begin and end, in turn
    begins, ends = edges[2::2], edges[1:-1:2]
    messages = [tuple(messages_T[end:begin].tolist()) for begin, end in zip(begins, ends, strict=True)]
    return [(), *messages] if len(edges) else []
