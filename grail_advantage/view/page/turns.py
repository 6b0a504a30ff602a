"""Turns of a conversation as the report shows them: their rewards, their advantages, calls that failed; and means by turn.

Shape suffixes: N turns of many responses, T response tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grail_advantage.data import LARGEST
from grail_advantage.dump import DumpHeader, DumpRow

FAILED_CALL = re.compile(
    r"""(?:^|[>\]\n"'])\s*(?:\w+:\s*)?"""  # where a chat template lets a tool's text begin
    r"(?:Error executing tool '[^'\n]*': |Unknown function '[^'\n]*'\. Available tools: |"
    r"Invalid JSON in arguments for '[^'\n]*': )"
)
"""What verl's tool agent loop says in place of a tool that raised or is not there, or on arguments that are no JSON; such a
call has the reward 0.0 (0.9.1, ``ToolAgentLoop._call_tool``)."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A run of tokens that the model wrote."""

    start: int
    end: int
    """Its tokens are ``start`` to ``end``, half-open."""
    reward: float | None
    advantages_T: np.ndarray
    """Of its tokens that train."""
    failed: int
    """Its calls without a result."""

    @property
    def advantage(self) -> float | None:
        """The one that all its tokens have; ``None`` where they differ, or none trains."""
        values = np.unique(self.advantages_T)
        return float(values[0]) if len(values) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of a response, which is one turn where nobody else wrote in it."""

    turns: Sequence[Turn]
    unplaced: Sequence[float]
    """Rewards of which it is not certain whose turn's they are."""


def has_turns(row: DumpRow) -> bool:
    """Whether a tool or a user wrote in the response, or its turns have rewards."""
    return bool(_tool_ranges(row) or _rewards(row))


def conversation(row: DumpRow, header: DumpHeader | None) -> Conversation:
    """The turns of a response, by its labels ``tool`` and ``turn_rewards``.

    Args:
        row: of a dump.
        header: of its file.
    """
    tool, rewards = _tool_ranges(row), _rewards(row)
    edges = [0, *(edge for bounds in tool for edge in bounds), len(row)]
    ranges = [bounds for bounds in zip(edges[::2], edges[1::2], strict=True) if bounds[0] < bounds[1]]
    # As the method has it, a list of one reward a call does not tell whose they are where it has one for each of several turns.
    by_call = header is not None and header.options.get("align") == "calls"
    given = row.labels.get("turn_rewards")
    by_call = by_call and not (isinstance(given, list) and any(isinstance(of_turn, list) for of_turn in given))
    certain = len(rewards) < len(ranges) + (not by_call or len(ranges) == 1)
    placed = rewards if certain else []
    special = header.special_tokens if header is not None else {}
    replies = {
        start: "".join(row.tokens[t] or special.get(int(row.token_ids_T[t]), "") for t in range(start, end))
        for start, end in tool
    }
    advantage_T = None if row.methods else row.advantage_T
    turns = [
        Turn(
            start=start,
            end=end,
            reward=placed[k] if k < len(placed) else None,
            advantages_T=np.zeros(0) if advantage_T is None else advantage_T[start:end][row.mask_T[start:end]],
            failed=len(FAILED_CALL.findall(replies.get(end, ""))),
        )
        for k, (start, end) in enumerate(ranges)
    ]
    return Conversation(turns=turns, unplaced=[] if certain else [reward for reward in rewards if reward is not None])


def _tool_ranges(row: DumpRow) -> list[list[int]]:
    """The ranges that others wrote; none where the label is nothing of that kind."""
    ranges = row.labels.get("tool")
    if not isinstance(ranges, list) or not all(map(is_range, ranges)):
        return []
    edges = [edge for bounds in ranges for edge in bounds]
    return ranges if edges == sorted(edges) and all(0 <= edge <= len(row) for edge in edges) else []


def is_range(value: Any) -> bool:
    """Whether a label is two places among tokens."""
    return isinstance(value, list) and len(value) == 2 and all(type(edge) is int for edge in value)


def _rewards(row: DumpRow) -> list[float | None]:
    """Rewards by turn, those of several calls summed, ``None`` for a turn without one; empty where the label is nothing of that
    kind, or has a reward that cannot train."""
    given = row.labels.get("turn_rewards")
    if not isinstance(given, list):
        return []
    calls = [of_turn if isinstance(of_turn, list) else [of_turn] for of_turn in given]
    known = [[reward for reward in of_turn if reward is not None] for of_turn in calls]
    if not all(type(reward) in (int, float) and abs(reward) <= LARGEST for of_turn in known for reward in of_turn):
        return []
    rewards = [float(sum(of_turn)) if of_turn else None for of_turn in known]
    return rewards if any(of_turn for of_turn in known) else []


# --------------------------------------------------------------------------------------------------------------- means by turn


def entries(step: int, turns: Sequence[Turn]) -> Iterator[float]:
    """Of each turn of a response four numbers: the step, the turn's own from 1, its reward and its mean advantage; NaN for what
    it does not have."""
    for number, turn in enumerate(turns, start=1):
        yield from (step, number, math.nan if turn.reward is None else turn.reward)
        yield float(turn.advantages_T.mean(dtype=np.float64)) if len(turn.advantages_T) else math.nan


def curves(runs: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Plots over the number of the turn, of all steps, the first and the last: means over the responses that reach the turn,
    and which share of the responses that is. A line has beside each value of how many turns it is.

    Args:
        runs: of each run the :func:`entries` of its responses, joined.
    """
    titles = ("Reward by turn", "mean"), ("Advantage by turn", "mean"), ("Share of responses", "share")
    plots: list[dict[str, Any]] = [{"title": title, "unit": unit, "lines": []} for title, unit in titles]
    for run, of_run in enumerate(runs):
        table_N4 = np.array(of_run, dtype=np.float64).reshape(-1, 4)
        steps = np.unique(table_N4[:, 0])
        ends = {f"step {step:.0f}": table_N4[:, 0] == step for step in (steps[:1].tolist() + steps[-1:].tolist())}
        for label, chosen_N in {"all": table_N4[:, 0] >= 0, **(ends if len(ends) > 1 else {})}.items():
            number_N, *values = table_N4[chosen_N, 1:].T
            means = [_means(number_N, value_N) for value_N in values]
            reach = _means(number_N, number_N)[1]
            for plot, (mean, count) in zip(plots, [*means, (reach / max(1, reach[0]), reach)], strict=True):
                known = np.flatnonzero(count)
                line = {"label": label, "run": run, "steps": known + 1, "values": mean[known], "counts": count[known]}
                plot["lines"] += [line] if len(known) else []
    return [plot for plot in plots if plot["lines"]]


def _means(number_N: np.ndarray, value_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By number from 1, the means of the finite values, and how many of these there are."""
    known = np.isfinite(value_N)
    place = number_N[known].astype(np.int64)
    count = np.bincount(place, minlength=2)[1:]
    return np.bincount(place, value_N[known], minlength=2)[1:] / np.maximum(1, count), count
