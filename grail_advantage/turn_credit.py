"""Credit by turn on plain lists: for any trainer, without a model, a tokenizer or a mask."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from grail_advantage.batch import MESSAGES
from grail_advantage.methods import method as known_method
from grail_advantage.signals.turns import Turns, TurnSignal, UncertainError, check_outcome, rewards_by_turn, runs

logger = logging.getLogger(__name__)
Rewards = Sequence[float | Sequence[float | None] | None]
"""Of a conversation's turns: a number, ``None`` for no reward, or a list of these for several calls of a turn."""


def turn_advantages(
    rewards: Sequence[Rewards],
    outcomes: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    method: str | TurnSignal = "turn_rloo",
    sessions: Sequence[Hashable] | None = None,
    before: Sequence[Sequence[Hashable]] | None = None,
    keys: Sequence[str] | None = None,
    **options: Any,
) -> list[list[float]]:
    """An advantage for each turn of each row.

    Example: two conversations of one prompt, the first of three turns, one of which made two calls.

    >>> turn_advantages([[0.5, [1.0, 1.0], None], [0.0]], outcomes=[1.0, 0.0], groups=["p", "p"])
    [[3.5, 3.0, 1.0], [-3.5]]

    A row is one sample of the trainer. Where a conversation has several, as after its context was compressed, they have the
    same session and are in order: their turns follow each other, and the last row's outcome counts once.

    Args:
        rewards: of each row's turns, as many entries as the model took turns.
        outcomes: each row's own reward, which counts with the last turn; ``None`` for 0.
        groups: which rows answer the same prompt.
        method: of turns, by name or with its options: ``turn_rloo``, ``mt_grpo``, ``gtpo``, ``gigpo`` or a registered one.
        sessions: which rows are one conversation; by default each is one.
        before: what was observed before each turn of each row, for ``gigpo``.
        keys: names of the rows, for messages; by default their places.
        options: of a method by name, such as ``gamma=0.9``; ``differences=True`` for scores of states in place of rewards.

    Returns:
        A list of the length of each row's rewards. A conversation with a number that is not finite has 0 on all turns: it
        trains nothing, is compared with no other, and is warned of.

    Raises:
        ValueError: an argument that does not fit, naming it and the row.
    """
    count = len(rewards)
    lists = {"outcomes": outcomes, "groups": groups, "sessions": sessions, "before": before, "keys": keys}
    for name, values in lists.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{name} must be one a row, {count} of them; got {len(values)}")
    for row, of_row in enumerate(rewards):
        if not isinstance(of_row, list | tuple | np.ndarray):
            raise ValueError(
                f"rewards: row {row} has {of_row!r}; give it a list with an entry for each turn, None for none"
            )
    signal = known_method(method).build(options) if isinstance(method, str) else method
    if not isinstance(signal, TurnSignal):
        raise ValueError(f"method={method!r} gives no advantages of turns; choose one of turns, such as 'turn_rloo'")
    if MESSAGES in signal.reads and before is None:
        raise ValueError(f"{signal.name} compares turns after the same observation; pass before=")
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row in range(count):
        rows_of[(groups[row], sessions[row]) if sessions is not None else row].append(row)

    found = [[0.0] * len(of_row) for of_row in rewards]
    members: list[tuple[Hashable, Turns]] = []
    rows_of_members: list[list[int]] = []
    for rows in rows_of.values():
        counts, last = [len(rewards[row]) for row in rows], rows[-1]
        if not sum(counts):
            continue
        key = keys[last] if keys is not None else str(last)
        outcome = float(outcomes[last] or 0.0)
        try:
            rewards_K = rewards_by_turn([rewards[row] for row in rows], counts, differences=signal.differences)
            check_outcome(outcome)
        except UncertainError as reason:
            logger.warning("%s: row %s trains nothing: it %s", signal.name, key, reason)
            continue
        except ValueError as error:
            raise ValueError(f"rewards: row {key} {error}") from None
        observed = [one for row in rows for one in before[row]] if before is not None else []
        if before is not None and len(observed) != sum(counts):
            raise ValueError(
                f"before: row {key} has {sum(counts)} turns and {len(observed)} observations; give one a turn"
            )
        members.append((groups[last], Turns(key, outcome, rewards_K, observed)))
        rows_of_members.append(rows)
    for rows, of_session_K in zip(rows_of_members, signal.by_groups(members), strict=True):
        left = iter(np.asarray(of_session_K, dtype=np.float64).tolist())
        for row in rows:
            found[row] = [next(left) for _ in rewards[row]]
    return found


def turns_to_tokens(advantages: Sequence[float], mask: Sequence[int]) -> list[float]:
    """A row's turn advantages on its tokens, 0 where the model did not write.

    >>> turns_to_tokens([3.5, -1.0], [1, 1, 0, 0, 1])
    [3.5, 3.5, 0.0, 0.0, -1.0]

    Args:
        advantages: of the row's turns.
        mask: 1 on the tokens that the model wrote; a turn is a run of these.

    Raises:
        ValueError: another number of runs than of advantages.
    """
    ranges = runs(np.asarray(mask))
    if len(ranges) != len(advantages):
        raise ValueError(
            f"mask has {len(ranges)} runs of tokens that the model wrote, advantages are {len(advantages)} turns'"
        )
    values = [0.0] * len(mask)
    for (start, stop), advantage in zip(ranges, advantages, strict=True):
        values[start:stop] = [float(advantage)] * (stop - start)
    return values
