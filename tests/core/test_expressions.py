"""Expressions of a user have one second of their own, and no text or expression ends a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import regex

from grail_advantage.answers import expressions
from grail_advantage.answers.expressions import find_matches
from grail_advantage.answers.format import answer_format

ENDLESS = (
    (r"(?P<content>(a|aa|aaa)+)[bc]$", "a" * 60 + "d b"),
    (r"(?P<content>\((?:[^()]|(?R))*\))", "(" * 200_000),
    (r"(?P<content>(?R)a|a)", "a" * 1000),
    (r"(?P<content>.)", "x" * 100_000_000),
)


@pytest.mark.parametrize(("expression", "text"), ENDLESS)
def test_what_takes_long_has_no_matches(expression: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.1)
    assert find_matches(regex.compile(expression), text) is None
    assert list(answer_format(expression).find(text.encode())) == []


def counting(needs: float, seconds: float, clock: list[float]) -> Any:
    """An expression that needs so much of regex's clock, of which one second passes in so many by the wall clock."""

    def finditer(text: str, timeout: float) -> Iterator[str]:
        clock[0] += min(needs, timeout) * seconds
        if timeout < needs:
            raise TimeoutError
        return iter([text])

    return SimpleNamespace(finditer=finditer)


@pytest.mark.parametrize(
    ("needs", "seconds", "found"),
    [(0.9, 1.0, True), (1.1, 1.0, False), (3.0, 0.1, True), (8.0, 0.1, True), (9.0, 0.1, False), (3.0, 0.9, False)],
)
def test_the_second_is_of_the_clock_and_not_of_other_threads(
    needs: float, seconds: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert find_matches(counting(needs, seconds, clock), "text") == (["text"] if found else None)
