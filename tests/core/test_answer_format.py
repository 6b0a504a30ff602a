"""Answers in a text against hand-worked cases and against a search that follows the definition byte by byte; a user's
expression has one second of its own, and no text or expression ends a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import regex

from grail_advantage.answers import expressions
from grail_advantage.answers.expressions import find_matches
from grail_advantage.answers.format import FORMATS, answer_format
from tests.core.plain_answers import EXPRESSION, PLAIN, plain_boxes

BY_HAND = (
    ("boxed", rb"no box \boxed {1} \fbox{1} boxed{1} \boxed{4", []),
    ("boxed", rb"a \boxed{\frac{1}{2}}.", [(2, 9, 20, 21)]),
    ("boxed", rb"\boxed{1} or \boxed{}", [(0, 7, 8, 9), (13, 20, 20, 21)]),
    ("boxed", rb"\boxed{ \boxed{1}", [(8, 15, 16, 17)]),
    ("boxed", rb"\boxed{\boxed{1}}\boxed{2}", [(0, 7, 16, 17), (17, 24, 25, 26)]),
    ("boxed", rb"}} \boxed{\{1,2\}}", [(3, 10, 17, 18)]),
    ("boxed", rb"\\boxed{1}", [(1, 8, 9, 10)]),
    ("boxed", rb"\boxed{\left\{ x \right.} }", [(0, 7, 24, 25)]),
    ("boxed", rb"\boxed{1\\{2}} \boxed{3\}", [(0, 7, 13, 14)]),
    ("boxed", b"\xff\\boxed{\xf0}", [(1, 8, 9, 10)]),
    ("hashes", b"#### Step 1\n####42 ### 4 #### x #### \n7 #### -", []),
    ("hashes", b"#### -1,000.5 apples\n##### 42", [(0, 5, 13, 13), (22, 27, 29, 29)]),
    ("hashes", b"\xff#### 4\xe6", [(1, 6, 7, 7)]),
    ("tag", b"<answer>4 <answer >5</answer > </answer", []),
    ("tag", b"<answer></answer> <answer>4</answer>", [(0, 8, 8, 17), (18, 26, 27, 36)]),
    ("tag", b"<answer>4 <answer>5</answer>", [(10, 18, 19, 28)]),
    ("tag", b"<answer><answer>5</answer></answer>", [(0, 8, 26, 35)]),
    ("tag", b"<|begin_of_box|>4<|end_of_box|>", [(0, 16, 17, 31)]),
    ("tag", b"<answer><|begin_of_box|>4<|end_of_box|></answer>", [(0, 8, 39, 48)]),
    ("tag", b"<answer>4<|end_of_box|>", []),
    (EXPRESSION, "é Answer: ½.\nAnswer: ".encode(), [(3, 11, 13, 13), (15, 23, 23, 23)]),
    (EXPRESSION, b"\xffAnswer: \xf0\x9f", [(1, 9, 11, 11)]),
    (r"(?P<content>\d+) is it|never", b"4 is it, 5, never", [(0, 0, 1, 7)]),
    (r"(?<=Answer: )(?P<content>\d+)", "½ Answer: 42".encode(), [(11, 11, 13, 13)]),
    (r"Answer: (?=(?P<content>\d+))", "½ Answer: 42".encode(), [(3, 11, 13, 13)]),
    (r"(?P<content>\d+) is it|never", b"never 4 is it", [(6, 6, 7, 13)]),
    (r"(?<=(?P<content>\d\d): )x", "½ 42: x".encode(), [(3, 3, 5, 8)]),
    (r"(?<=(?P<content>..))!", "é½!!".encode(), [(0, 0, 4, 5), (2, 2, 5, 6)]),
    (r"(?P<content>)", b"empty matches are none", []),
    (r"(?s)<a>(?P<content>.*?)</a>", b"<a>1\n2</a>", [(0, 3, 6, 10)]),
)
UNITS = {
    "boxed": [b"\\boxed{", b"boxed", b"{", b"}", b"\\"],
    "hashes": [b"####", b"#", b" ", b"-", b"4", b",", b"x"],
    "tag": [b"<answer>", b"</answer>", b"<|begin_of_box|>", b"<|end_of_box|>", b"4"],
    EXPRESSION: [b"Answer", b": ", b".", "½".encode(), b"\xe6"],
}


def test_by_hand() -> None:
    for answer, text, boxes in BY_HAND:
        assert list(answer_format(answer).find(text)) == boxes, (answer, text)


@pytest.mark.parametrize("answer", PLAIN)
def test_every_short_text(answer: str) -> None:
    for length in range(6):
        for units in itertools.product(UNITS[answer], repeat=length):
            text = b"".join(units)
            assert list(answer_format(answer).find(text)) == plain_boxes(text, answer), text


def test_hashes_hold_the_number_that_verls_reward_judges() -> None:
    extract_solution = pytest.importorskip("verl.utils.reward_score.gsm8k").extract_solution
    for length in range(6):
        for units in itertools.product(["#### ", "####", "-", "4", ",", ".", " ", "\n"], repeat=length):
            text = "".join(units)
            boxes = list(FORMATS["hashes"].find(text.encode()))
            content = text[boxes[-1][1] : boxes[-1][2]].replace(",", "") if boxes else None
            assert content == extract_solution(text), text


def test_the_search_is_linear() -> None:
    """In 200 kB, for which a search that starts over at each opener takes hours."""
    n = 28_571
    opened = b"\\boxed{" * n
    for text, expected in (
        (opened, None),
        (opened + b"}", (7 * n - 7, 7 * n, 7 * n, 7 * n + 1)),
        (opened + b"}" * (n - 1), (7, 14, 8 * n - 2, 8 * n - 1)),
        (opened + b"}" * n, (0, 7, 8 * n - 1, 8 * n)),
        (b"}" * n + opened, None),
        (b"\\boxed{1}" + b"\\boxed{{" * n + b"}", (0, 7, 8, 9)),
    ):
        assert next(reversed(list(FORMATS["boxed"].find(text))), None) == expected
    opened = b"<answer>" * n
    assert next(FORMATS["tag"].find(opened + b"</answer>" * n)) == (0, 8, 17 * n - 9, 17 * n)
    assert list(FORMATS["tag"].find(opened)) == []
    assert len(list(FORMATS["hashes"].find(b"#### 1" * n))) == n
    assert len(list(answer_format(EXPRESSION).find("½Answer: 1.".encode() * n))) == n


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


def test_the_second_is_of_the_clock_and_not_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression needs so much of regex's clock, of which one second passes in so many by the wall clock."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cases = (
        (0.9, 1.0, True),
        (1.1, 1.0, False),
        (3.0, 0.1, True),
        (8.0, 0.1, True),
        (9.0, 0.1, False),
        (3.0, 0.9, False),
    )
    for needs, seconds, found in cases:
        clock[0] = 0.0

        def finditer(text: str, timeout: float, needs: float = needs, seconds: float = seconds) -> Iterator[str]:
            clock[0] += min(needs, timeout) * seconds
            if timeout < needs:
                raise TimeoutError
            return iter([text])

        assert find_matches(SimpleNamespace(finditer=finditer), "text") == (["text"] if found else None)
