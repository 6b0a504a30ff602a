"""Advantages of turns for any trainer, from lists of rewards."""

import logging
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from grail_advantage.data import runs
from grail_advantage.method import build
from grail_advantage.methods.sessions import Session, TurnMethod
from grail_advantage.methods.turn_rewards import Rewards

logger = logging.getLogger(__name__)


def turn_advantages(
    rewards: Sequence[Rewards],
    outcomes: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    method: str | TurnMethod = "turn_rloo",
    sessions: Sequence[Hashable] | None = None,
    before: Sequence[Sequence[Hashable]] | None = None,
    keys: Sequence[str] | None = None,
    **options: Any,
) -> list[list[float]]:
    """An advantage for each turn of each row, for any trainer. Two conversations of one prompt, the first of three
    turns:

    >>> turn_advantages([[0.5, [1.0, 1.0], None], [0.0]], outcomes=[1.0, 0.0], groups=["p", "p"])
    [[3.5, 3.0, 1.0], [-3.5]]

    A row is one sample of the trainer. Where a conversation has several, they have the same session and are in order:
    their turns follow each other, and the last row's outcome counts once.

    Args:
        rewards: of each row's turns, as many entries as the model took turns.
        outcomes: each row's own reward, which counts with the last turn; ``None`` for 0.
        groups: which rows answer the same prompt.
        method: of turns, by name or with its options: ``turn_rloo``, ``mt_grpo``, ``turn_grpo``, ``gigpo`` or a registered
            one.
        sessions: which rows are one conversation; by default each is one.
        before: what was observed before each turn of each row, for ``gigpo``.
        keys: names of the rows, for messages; by default their places.
        options: of a method by name, such as ``gamma=0.9``; ``differences=True`` for scores of states.

    Returns:
        A list of the length of each row's rewards; 0 for a conversation with a number that is not finite, which is
        warned of.

    Raises:
        ValueError: an argument that does not fit, naming it and the row.
    """
    lists = {
        "outcomes": outcomes,
        "groups": groups,
        "sessions": sessions,
        "before": before,
        "keys": keys,
    }
    for name, values in lists.items():
        if values is not None and len(values) != len(rewards):
            raise ValueError(f"{name} must be one a row, {len(rewards)} of them; got {len(values)}")
    for row, of_row in enumerate(rewards):
        if not isinstance(of_row, list | tuple | np.ndarray):
            raise ValueError(
                f"rewards: row {row} has {of_row!r}; give it a list with an entry for each turn, None for none"
            )
    m = build(method, options) if isinstance(method, str) else method
    if not isinstance(m, TurnMethod):
        raise ValueError(
            f"method={method!r} gives no advantages of turns; choose one of turns, such as 'turn_rloo'"
        )
    if m.control != "none":
        raise ValueError(
            f"control={m.control!r} moves advantages among a response's tokens; here are none, leave it out"
        )
    if "messages" in m.reads and before is None:
        raise ValueError(f"{m.name} compares turns after the same observation; pass before=")
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row in range(len(rewards)):
        # The names of sessions need to differ within a group alone.
        rows_of[(groups[row], sessions[row]) if sessions is not None else row].append(row)
    known_sessions = []
    for rows in rows_of.values():
        last = rows[-1]
        key = str(last if keys is None else keys[last])
        turns = [(row, turn, turn + 1) for row in rows for turn in range(len(rewards[row]))]
        if not turns:
            continue
        observed = []
        if before is not None:
            observed = list(chain(*(before[row] for row in rows)))
            if len(observed) != len(turns):
                had = f"{len(turns)} turns and {len(observed)} observations"
                raise ValueError(f"before: row {key} has {had}; give one a turn")
        known_sessions.append(
            Session(
                key=key,
                group=groups[last],
                outcome=float(outcomes[last] or 0.0),
                lists=[rewards[row] for row in rows],
                counts=[len(rewards[row]) for row in rows],
                align="turns",
                turns=turns,
                before=observed,
            )
        )
    compared, reasons = m.compare(known_sessions, "rewards: row")
    for reason in reasons:
        logger.warning("%s: a row trains nothing: %s", m.name, reason)
    advantages = [[0.0] * len(of_row) for of_row in rewards]
    for session, of_session in compared:
        values = np.nan_to_num(of_session).tolist()
        for (row, turn, _), advantage in zip(session.turns, values, strict=True):
            advantages[row][turn] = advantage
    return advantages


def turns_to_tokens(advantages: Sequence[float], mask: Sequence[int]) -> list[float]:
    """A row's turn advantages on its tokens, by the mask of those that the model wrote. ValueError: another number of
    turns.

    >>> turns_to_tokens([3.5, -1.0], [1, 1, 0, 0, 1])
    [3.5, 3.5, 0.0, 0.0, -1.0]
    """
    ranges = runs(np.asarray(mask))
    values = np.zeros(len(mask))
    if len(ranges) != len(advantages):
        raise ValueError(
            f"mask has {len(ranges)} turns, runs of tokens that the model wrote; advantages {len(advantages)}"
        )
    for (start, stop), advantage in zip(ranges, advantages, strict=True):
        values[start:stop] = advantage
    return values.tolist()
