"""The public doors give the right result or a ``ValueError`` that names the argument, whatever plausible mistake a call has."""

from __future__ import annotations

import pytest

from tests.core import doors


@pytest.mark.parametrize(("door", "kind"), [("weights", "grail"), ("receipt", "clip")])
def test_each_mistake_alone(door: str, kind: str) -> None:
    table = {"weights": doors.WEIGHTS, "receipt": doors.RECEIPT}[door].changes
    wrong = {
        f"{place} {change[1]}": found
        for place, change in enumerate(table)
        if (found := doors.outcome(door, kind, [change]))
    }
    assert wrong == {}


@pytest.mark.parametrize("door", ["weights", "receipt"])
def test_one_or_two_mistakes_at_random(door: str) -> None:
    wrong, examples = doors.fuzz(door, 150)
    assert not wrong, examples
