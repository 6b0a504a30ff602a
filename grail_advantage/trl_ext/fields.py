"""Fields of TRL's responses, which methods read as ``field:NAME``: above all rewards by turn.

A field is what a reward function logs with ``log_extra(NAME, values)``, else the attribute NAME of the response's environment,
else a column of the data set or of what ``rollout_func`` returns. It goes into the rows of the data, where TRL puts the last of
these itself (grpo_trainer.py:2741).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from grail_advantage.data import runs
from grail_advantage.method import Method
from grail_advantage.methods.turns import TurnMethod


class CallRewards:
    """Which turn an environment's rewards are from.

    An environment is told of calls and not of turns, and of no call that fails before it. So its list of rewards is looked at
    before each turn: between two turns of a batch TRL makes the calls of the first, of all responses (grpo_trainer.py:1957).

    Args:
        signal: the method. Of one without turns nothing is looked at.
    """

    def __init__(self, signal: Method) -> None:
        self.name = signal.rewards if isinstance(signal, TurnMethod) else ""
        """The attribute of an environment."""
        self._counts: list[list[int]] = []

    def begin(self) -> None:
        """A generation batch begins."""
        self._counts = []

    def look(self, environments: Sequence[Any] | None) -> None:
        """A turn begins: the first of every response, then the next of those that go on."""
        values = [getattr(environment, self.name, None) for environment in environments or ()] if self.name else []
        self._counts.append([len(value) if isinstance(value, list) else 0 for value in values])

    def by_turn(self, lists: Sequence[Any], tool_mask: Sequence[Sequence[int]] | None) -> list[Any]:
        """Each response's rewards as a list of its calls' for each turn; with the last turn also what came after it, as from
        ``get_reward``. Anything but a list stays, for the method to refuse.

        Args:
            lists: the list of each response's environment, a call's reward after the other's; ``None`` for one without.
            tool_mask: of each response, 1 on the tokens that the model wrote; ``None`` where these are all.
        """
        split = []
        for place, rewards in enumerate(lists):
            if isinstance(rewards, list | None):
                turns = 1 if tool_mask is None else max(1, len(runs(np.array(tool_mask[place]))))
                before = [counts[place] for counts in self._counts[:turns]]
                given = rewards or []
                rewards = [given[start:end] for start, end in pairwise([*before, len(given)])]
            split.append(rewards)
        return split


def fill_in(
    rows: Sequence[dict[str, Any]],
    signal: Method,
    logged: Mapping[str, Sequence[Any]],
    environments: Sequence[Any] | None,
    calls: CallRewards,
    tool_mask: Sequence[Sequence[int]] | None,
) -> None:
    """Put the fields that the method reads into the rows of a batch's responses.

    Args:
        rows: of the data set, one a response.
        signal: the method.
        logged: what reward functions logged, by name.
        environments: one a response, ``None`` without any.
        calls: of the batch.
        tool_mask: of each response, 1 on the tokens that the model wrote; ``None`` where these are all.

    Raises:
        ValueError: a field that is nowhere, or not one value a response.
    """
    for name in signal.field_names:
        if name in logged:
            if len(logged[name]) != len(rows):
                raise ValueError(
                    f"log_extra({name!r}, ...) got {len(logged[name])} values; log one a response, {len(rows)}, once"
                )
            values: Sequence[Any] = logged[name]
        elif any(hasattr(environment, name) for environment in environments or ()):
            values = [getattr(environment, name, None) for environment in environments or ()]
            if name == calls.name:
                values = calls.by_turn(values, tool_mask)
        elif any(name in row for row in rows):
            continue
        else:
            raise ValueError(
                f"token_weights={signal.name!r} reads the field {name!r}, which is nowhere; have a reward function call "
                f"log_extra({name!r}, values), or give the environment the attribute, or the data the column {name}"
            )
        for row, value in zip(rows, values, strict=True):
            row[name] = value
