"""The public doors give the right result or a ``ValueError`` that names the argument, whatever plausible mistake a call has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grail_advantage.receipt import check
from tests.core import doors


@pytest.mark.parametrize(("door", "kind"), [("weights", "grail"), ("receipt", "clip")])
def test_each_mistake_alone(door: str, kind: str) -> None:
    table = doors.DOORS[door].changes
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


@pytest.mark.parametrize("kind", ["clip", "function"])
def test_probabilities_in_place_of_what_the_trainer_computed_are_a_finding(kind: str) -> None:
    """What is measured is reported, whatever it is: a policy that has moved may look like it."""
    call = doors.valid_receipt(kind)
    call["pieces"] = [replace(piece, log_probs_bT=piece.log_probs_bT.exp()) for piece in call["pieces"]]
    assert not check(**call).ok
