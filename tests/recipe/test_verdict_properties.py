"""Random answers, spelt in many ways and changed in one place, and what holds of the normal form.

``verdict_properties.jsonl`` has 240 expressions in ten styles, whose values were compared at two points modulo a prime in
which -1 has a root, and 150 numbers, lists, sets and tuples of fractions. No judge computed what is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from grail_advantage.reward._normal import RULES, normal
from tests.recipe.test_reward import misjudged, rows_of

pytestmark = pytest.mark.slow
ROWS = rows_of(Path(__file__).with_name("verdict_properties.jsonl"))
CASES = [
    (row["gold"], box, value) for row in ROWS for key, value in (("right", 1.0), ("wrong", 0.0)) for box in row[key]
]


def test_random_answers_and_the_same_changed_in_one_place() -> None:
    assert len(CASES) == 801 and misjudged(CASES) == []


def test_each_rule_is_needed_for_its_example() -> None:
    for rule in RULES:
        text = example = rule[0]
        for other in RULES:
            text = text if other is rule else other[1].sub(other[2], text)
        assert " ".join(text.split()) != normal(example) == normal(normal(example)) != example, example


def test_the_normal_form_is_its_own() -> None:
    texts = {normal(text) for gold, box, _ in CASES for text in (gold, box)}
    assert [text for text in texts if normal(text) != text] == []
