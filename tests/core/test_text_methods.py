"""The methods that read tokens: `pattern`, `step_values`, and one of a field; by hand and against loops over characters."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import regex
import torch

from grail_advantage import Method, Rollouts
from grail_advantage.answers.text import decode_pieces
from grail_advantage.methods.text import Pattern, StepValues, cut, matched, result
from tests.core.common import weighed
from tests.core.plain_weights import close
from tests.core.test_turns import Talk, batch_of, of_rows, token_advantages
from tests.core.tiny_models import END, END_ID


def said(advantage: float, text: str, group: int = 0, masked: bool = False) -> Talk:
    """A response of one turn, which ends."""
    return Talk([text + END], [], [], advantage, group, masked, advantage)


SUMS = [said(1.0, "3+4=7, 7*2= $1,400.50."), said(-1.0, "3+4=8 then 8="), said(0.5, "none here"), said(0.0, "1=1")]
RIGHT, WRONG, NONE, UNTRAINED = "....#.......#########..", "....#.........", "." * 10, "1" * 4
PICTURES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, [RIGHT, WRONG.replace("#", "."), NONE, UNTRAINED]),
    ({"gate": "wrong", "elsewhere": 1}, ["1" * 23, WRONG, "1" * 10, UNTRAINED]),
    ({"gate": "all", "inside": 3, "outside": 0.5}, [RIGHT, WRONG, NONE, UNTRAINED]),
    ({"expression": r"=7(?P<content>, 7)"}, [".....###...............", NONE + "....", NONE, UNTRAINED]),
]
"""Inside is #, outside a dot, and 1 a weight of 1; the last character is the end token."""


def test_what_matches_is_inside() -> None:
    r = batch_of(SUMS)
    for options, pictures in PICTURES:
        values = {"#": options.get("inside", 1.0), ".": options.get("outside", 0.0), "1": 1.0}
        weights = of_rows(weighed(Pattern(**options), r).weights, r)
        close(weights, [[values[sign] for sign in picture] for picture in pictures])


def test_an_expression_that_takes_too_long_leaves_the_row_as_it_is() -> None:
    w = weighed(Pattern(expression="(a|aa)+$"), batch_of([said(1.0, "a" * 60 + "b"), said(1.0, "baa")]))
    assert w.failed.tolist() == [True, False]
    assert w.weights[0].tolist() == [1.0] * 62 and w.weights[1, :4].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_token_with_the_first_bytes_of_a_character_that_matches_is_inside() -> None:
    """And one with the first bytes of a character is of the step that the character is in."""
    euro = "€".encode()
    texts = decode_pieces([b"a", b";", euro[:1], euro[1:2], euro[2:] + b"b", b"", b"c"])
    have_bytes = np.array([True] * 5 + [False, True])
    inside = matched(texts, have_bytes, regex.compile("€"))
    assert inside.tolist() == [False, False, True, True, True, False, False]
    steps, states = cut(texts, have_bytes, regex.compile(";"))
    assert steps.tolist() == [0, 0, 1, 1, 1, 1, 1] and states == [(0, "a;"), (1, "€bc")]


STEPS = StepValues(separator=";+")  # the tokenizer has no line feed


def plain_step_values(rows: Sequence[Talk], shrink: float) -> list[list[float]]:
    """Over characters, with sums over all pairs of responses."""
    steps_of = {id(row): re.findall(r"[^;]*;+|[^;]+$", row.text.removesuffix(END)) or [""] for row in rows}
    used = [row for row in rows if not row.masked and math.isfinite(row.advantage)]

    def state(line: str) -> Any:
        numbers = re.findall(r"-?[0-9]+", line)
        return int(numbers[-1]) if numbers else " ".join(line.split())

    def value(row: Talk, place: int) -> float:
        if place == len(steps_of[id(row)]) - 1:
            return row.advantage
        others = [(of, steps_of[id(of)]) for of in used if of.group == row.group]
        wanted = state(steps_of[id(row)][place])
        alike = [of.advantage for of, steps in others if place < len(steps) - 1 and state(steps[place]) == wanted]
        return math.fsum(alike) / (len(alike) + shrink)

    advantages = []
    for row in rows:
        out, before = [], 0.0
        for place, step in enumerate(steps_of[id(row)] if row in used else ()):
            out += [value(row, place) - before] * len(step)
            before = value(row, place)
        advantages.append([*out, out[-1] if out else row.advantage] if row in used else [0.0] * len(row.written))
    return advantages


@pytest.mark.parametrize("seed", range(4))
def test_step_values_against_loops(seed: int) -> None:
    """Masked responses, and those whose advantage is not finite, count in no state and train nothing; those with 0 do both."""
    draw, rows = random.Random(seed), []
    for group in [*range(3)] * 8:
        steps = [draw.choice(["1=-2", "so 3", "say", "say it", "4"]) for _ in range(draw.randint(1, 4))]
        text = "".join(step + draw.choice([";", ";;"]) for step in steps).rstrip(";" * draw.randint(0, 1))
        advantage = draw.choice([0.0, 0.5, 1.25, -0.75, *([math.nan, -math.inf] if seed % 2 else [])])
        rows.append(said(advantage, text, group, masked=draw.random() < 0.15))
    for shrink in (1.0, 0.0, 2.5):
        advantages = token_advantages(StepValues(separator=";+", shrink=shrink), batch_of(rows))
        close(advantages, plain_step_values(rows, shrink), 1e-5)


def test_a_token_without_text_belongs_to_the_step_before_it() -> None:
    r = batch_of([said(0.5, "1;aa"), said(-0.5, "2;bb")])
    r.responses[0][2] = END_ID  # where the second step begins
    first, second = 0.5 / 2, 0.5 - 0.5 / 2
    assert token_advantages(STEPS, r)[0] == pytest.approx([first, first, first, second, second])


def test_no_method_trains_a_masked_row() -> None:
    class Careless(Method):
        gives = "advantages"

        def select(self, r: Rollouts) -> torch.Tensor:
            return torch.ones(len(r), dtype=torch.bool)

        def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
            return torch.ones(r.mask.shape)

    advantages = token_advantages(Careless(), batch_of([said(0.5, "a"), said(-0.5, "b", masked=True)]))
    assert advantages == [[1.0, 1.0], [0.0, 0.0]]


RESULTS = {
    **{"so 1,200.50 it is": "1200.5", "-0.0": "0", "= -007": "-7", "+3.": "3", "10-3": "3", "x-3, y=-4": "-4"},
    **{"(1)-3": "3", "(3,4)": "4", "1,2345": "2345", "12,345,678": "12345678", " a  b\n": "a b", "12, then": "12"},
}


def test_results() -> None:
    assert {step: result(step) for step in RESULTS} == RESULTS
