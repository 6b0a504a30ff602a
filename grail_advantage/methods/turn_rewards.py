"""Lists of rewards by turn, as data, reward functions and agent loops give them. A list is *flat* where no entry of it
is a list. ValueError: no such list; :class:`UncertainError`: a number that is not finite, or one of no certain turn."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from grail_advantage.data import within_range

# By turn; a list for several calls of a turn
Rewards = Sequence[float | Sequence[float | None] | None]


class UncertainError(ValueError):
    """A session that cannot be compared with others, and trains nothing."""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def read_rewards(rewards: Any) -> tuple[list[list[float]], bool]:
    """The numbers of each entry, and whether the list is flat: ``[0.5, None]`` gives ``[[0.5], []]`` and True, ``[[1,
    2], None]`` gives ``[[1.0, 2.0], []]`` and False."""
    entries = [] if rewards is None else _plain(rewards)
    if not isinstance(entries, list | tuple):
        raise ValueError(
            f"has {rewards!r}; give it a list with a number, None or a list of numbers for each turn"
        )
    calls = []
    is_flat = True
    for entry in map(_plain, entries):
        numbers = [entry]
        if isinstance(entry, list | tuple):
            numbers = list(entry)
            is_flat = False
        numbers = [number for number in numbers if number is not None]
        if not all(isinstance(number, int | float | np.number) for number in numbers):
            raise ValueError(
                f"has the reward {entry!r}; give a number, None or a list of numbers for each turn"
            )
        try:
            values = np.array(numbers, dtype=np.float64)
        except OverflowError:
            # A whole number beyond the floats, as 10**400
            values = np.array([math.inf])
        if not within_range(values).all():
            raise UncertainError(f"has the reward {entry!r}, which is not finite or too large")
        calls.append(values.tolist())
    return calls, is_flat


def rewards_label(rewards: Any) -> list[Any]:
    """A list of rewards for the dump's label: numbers, ``None``, and lists of a turn's calls; empty where it is
    none."""
    try:
        calls, is_flat = read_rewards(rewards)
    except ValueError:
        return []
    if not is_flat:
        return calls
    return [numbers[0] if numbers else None for numbers in calls]


def list_a_turn(rewards: Any, turns: int) -> Any:
    """A flat list of as many rewards as turns, as a list for each turn; else as it is. For a host in which no turn
    makes two calls, and the last turn's call may have no answer."""
    try:
        calls, is_flat = read_rewards(rewards)
    except ValueError:
        return rewards
    return calls if is_flat and len(calls) == turns else rewards


def rewards_by_turn(
    lists: Sequence[Any], turns: Sequence[int], align: str = "turns", *, differences: bool = False
) -> np.ndarray:
    """The rewards of a session's turns, float64 (K,). ``[[0.5, None, [1, 1]]]`` gives ``[0.5, 0, 2]``: of the three
    turns the second has no reward, the third made two calls. With ``differences`` ``[[0.2, None, 0.5]]`` gives ``[0.2,
    0, 0.3]``.

    Args:
        lists: one for each response, of its own turns; where the last alone has one that is not ``None``, of the
            session's.
        turns: of each response.
        align: what a flat list holds, see :attr:`grail_advantage.methods.sessions.TurnMethod.align`.
    """
    if all(rewards is None for rewards in lists[:-1]):
        lists = lists[-1:]
        turns = [sum(turns)]
    calls: list[list[float]] = []
    for rewards, count in zip(lists, turns, strict=True):
        calls += _calls_by_turn(rewards, count, align)
    if not differences:
        return np.array([sum(numbers) for numbers in calls], dtype=np.float64)
    scores = [0.0]
    for numbers in calls:
        # A turn without a score leaves the state as it was.
        scores.append(numbers[-1] if numbers else scores[-1])
    return np.diff(scores)


def _calls_by_turn(rewards: Any, turns: int, align: str) -> list[list[float]]:
    """The numbers of each turn of one list."""
    calls, is_flat = read_rewards(rewards)
    counted = f"has {turns} turns and the {len(calls)} rewards {rewards!r}"
    if align == "calls" and is_flat:
        if turns == 1:
            # There is no other turn.
            calls = [list(chain(*calls))]
        elif len(calls) >= turns:
            remedy = "give a list for each turn, such as [[1, 0.5], [0]], or with align=turns one number for each"
            raise UncertainError(
                f"{counted}, so that it is not certain which turn each belongs to; {remedy}"
            )
    allowed = [turns] if align == "turns" and is_flat else [turns - 1, turns]
    if len(calls) not in allowed:
        wants = "with turns one a turn, with calls one for each turn that a tool answered"
        raise ValueError(
            f"{counted}, where align={align} wants {' or '.join(map(str, allowed))}: {wants}"
        )
    return calls + [[]] * (turns - len(calls))
