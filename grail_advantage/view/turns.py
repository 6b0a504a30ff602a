"""The model's turns in a response, by its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_advantage.data import LARGEST


def turns(labels: Mapping[str, Any], length: int, align: str | None) -> list[list[Any]]:
    """``[start, end, reward]`` of each turn of a response of ``length`` tokens; the reward is ``None`` where a turn has none,
    or it is not certain whose it is. Labels: ``tool`` has the ranges that others wrote, ``turn_rewards`` a reward a turn, or
    a list of its calls' rewards; those of another kind are as none. ``align``: the method's option of that name."""
    tool = [range_of(bounds, length) or (1, 0) for bounds in _list(labels.get("tool"))]
    edges = [0, *(edge for bounds in tool for edge in bounds), length]
    if edges != sorted(edges):
        edges = [0, length]
    ranges = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    given = _list(labels.get("turn_rewards"))
    calls = [[call for call in (each if isinstance(each, list) else [each]) if call is not None] for each in given]
    known = all(type(call) in (int, float) and abs(call) <= LARGEST for each in calls for call in each)
    # One reward a call does not tell whose it is, where a turn may have several calls.
    by_call = align == "calls" and not any(isinstance(each, list) for each in given)
    certain = known and len(calls) < len(ranges) + (not by_call or len(ranges) == 1)
    rewards = [float(sum(each)) if each else None for each in calls] if certain else []
    rewards += [None] * (len(ranges) - len(rewards))
    return [[start, end, reward] for (start, end), reward in zip(ranges, rewards, strict=True)]


def range_of(label: Any, length: int) -> tuple[int, int] | None:
    """A label as two places among ``length`` tokens, half-open; ``None`` where it is nothing of that kind."""
    if isinstance(label, list) and len(label) == 2 and all(type(edge) is int for edge in label):
        return (label[0], label[1]) if 0 <= label[0] <= label[1] <= length else None
    return None


def _list(label: Any) -> list[Any]:
    return label if isinstance(label, list) else []
