"""Answers in a text against hand-worked cases and against a search that follows the definition byte by byte; a user's
expression has one second of its own; runs whose responses have no answers stop, or there is a warning, with the remedy."""

import itertools
import logging
import time
from types import SimpleNamespace

import pytest
import regex

from grail_advantage import Grail, Method
from grail_advantage.answers import expressions
from grail_advantage.answers.expressions import find_matches
from grail_advantage.answers.format import FORMATS, answer_format
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.method import build
from tests.core.common import rollouts_of
from tests.core.plain_answers import EXPRESSION, PLAIN, plain_boxes
from tests.core.tiny_models import encode, read_lines

BY_HAND = read_lines("boxes.jsonl")
"""A format, a text with a character a byte, and start, content and end of each answer in it."""
UNITS = {
    "boxed": [b"\\boxed{", b"boxed", b"{", b"}", b"\\"],
    "hashes": [b"####", b"#", b" ", b"-", b"4", b",", b"x"],
    "tag": [b"<answer>", b"</answer>", b"<|begin_of_box|>", b"<|end_of_box|>", b"4"],
    EXPRESSION: [b"Answer", b": ", b".", "½".encode(), b"\xe6"],
}


def test_by_hand():
    assert len(BY_HAND) == 30
    for case in BY_HAND:
        boxes = answer_format(case["answer"]).find(case["text"].encode("latin-1"))
        assert list(map(list, boxes)) == case["boxes"], case


@pytest.mark.parametrize("answer", PLAIN)
def test_every_short_text(answer):
    for length in range(6):
        for units in itertools.product(UNITS[answer], repeat=length):
            text = b"".join(units)
            assert list(answer_format(answer).find(text)) == plain_boxes(text, answer), text


def test_hashes_hold_the_number_that_verls_reward_judges():
    extract_solution = pytest.importorskip("verl.utils.reward_score.gsm8k").extract_solution
    for length in range(6):
        for units in itertools.product(
            ["#### ", "####", "-", "4", ",", ".", " ", "\n"], repeat=length
        ):
            text = "".join(units)
            boxes = list(FORMATS["hashes"].find(text.encode()))
            content = text[boxes[-1][1] : boxes[-1][2]].replace(",", "") if boxes else None
            assert content == extract_solution(text), text


def test_the_search_is_linear():
    """In 200 kB, for which a search that starts over at each opener takes hours."""
    # 7 bytes of an opener, so many times: 200 kB.
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
    assert next(FORMATS["tag"].find(opened + b"</answer>" * n)) == (
        0,
        8,
        17 * n - 9,
        17 * n,
    )
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
def test_what_takes_long_has_no_matches(expression, text, monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 0.1)
    assert find_matches(regex.compile(expression), text) is None
    assert list(answer_format(expression).find(text.encode())) == []


@pytest.mark.parametrize(
    ("needs", "seconds", "has_time"),
    [
        (0.9, 1.0, True),
        (3.0, 0.1, True),
        (8.0, 0.1, True),
        (1.1, 1.0, False),
        (9.0, 0.1, False),
        (3.0, 0.9, False),
    ],
)
def test_the_second_is_of_the_clock_and_not_of_other_threads(
    needs, seconds, has_time, monkeypatch
):
    """An expression needs so much of regex's clock, of which one second passes in so many by the wall clock."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def finditer(text, timeout):
        # The wall clock passes as far as the expression needs, or as the limit lets it.
        clock[0] += min(needs, timeout) * seconds
        if timeout < needs:
            raise TimeoutError
        return iter([text])

    matches = find_matches(SimpleNamespace(finditer=finditer), "text")
    assert matches == (["text"] if has_time else None)


HASHES = "so #### 42"
BOX = r"so \boxed{42}"
NONE = "so 42"


def looked(watch: AnswerCheck, texts: list[str], answer: str = "boxed"):
    ids = list(map(encode, texts))
    form = answer_format(answer)
    watch.look(rollouts_of(ids, [0.0] * len(ids), known_spans={}, answer=form))


def watch(
    choice: str = "stop", method: Method | None = None, answer: str = "boxed", **options
) -> AnswerCheck:
    return AnswerCheck(method or Grail(), answer_format(answer), choice, "here.", **options)


def test_a_first_batch_without_answers_stops():
    """It names the format that has them; a small batch without answers is bad luck, and all processes count together."""
    for texts, answer, named in (
        ([HASHES] * 31 + [NONE], "boxed", "here.answer=hashes"),
        ([NONE] * 32, "boxed", "here.missing_answers=warn"),
        ([BOX] * 32, "tag", "here.answer=boxed"),
    ):
        with pytest.raises(ValueError, match=named):
            looked(watch(answer=answer), texts, answer)
    # 24 without an answer are too few to stop; 32 are enough, unless one of them had an answer.
    answered = watch()
    looked(answered, [HASHES] * 24 + [BOX])
    looked(answered, [HASHES] * 64)
    unanswered = watch()
    looked(unanswered, [HASHES] * 24)
    with pytest.raises(ValueError):
        looked(unanswered, [HASHES] * 8)
    looked(watch(total=lambda counts: [counts[0] + 1, 64]), [NONE] * 8)
    with pytest.raises(ValueError):
        looked(watch(total=lambda counts: [counts[0], 64]), [NONE] * 8)


def test_a_low_share_is_warned_of_once(caplog):
    """A fifth is not low, and a method that reads no answer needs none."""
    for check, first, warnings in (
        # One of ten is low; one of five is not.
        (watch("stop"), [BOX] + [NONE] * 9, 1),
        (watch("warn"), [NONE] * 40, 1),
        (watch("stop"), [BOX] + [NONE] * 4, 0),
        (watch("ignore"), [NONE] * 40, 0),
        (watch(method=build("uniform")), [NONE] * 40, 0),
        (watch(method=build("surprisal", {"statistics": "response"})), [NONE] * 40, 0),
    ):
        caplog.clear()
        looked(check, first)
        for _ in range(3):
            looked(check, first if not warnings else [NONE] * 9 + [BOX])
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warnings
