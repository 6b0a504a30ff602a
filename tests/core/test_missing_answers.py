"""Runs whose responses have no answers stop, or are warned of, with the remedy."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from grail_advantage import Grail, Method, Rollouts
from grail_advantage.answers.format import answer_format
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.method import build
from tests.core.common import rollouts_of
from tests.core.tiny_models import encode

HASHES, BOX, NONE = "so #### 42", r"so \boxed{42}", "so 42"


def said(texts: list[str], answer: str = "boxed", **parts: Any) -> Rollouts:
    r = rollouts_of(list(map(encode, texts)), [0.0] * len(texts), **parts)
    return replace(r, known_spans={}, answer=answer_format(answer))


def looked(watch: AnswerCheck, texts: list[str], answer: str = "boxed") -> None:
    watch.look(said(texts, answer))


def watch(choice: str = "stop", method: Method | None = None, answer: str = "boxed", **given: Any) -> AnswerCheck:
    return AnswerCheck(method or Grail(), answer_format(answer), choice, "here.", **given)


def test_a_first_batch_without_answers_stops() -> None:
    """It names the format that has them; a small batch without answers is bad luck, and all processes count together."""
    for texts, answer, named in (
        ([HASHES] * 31 + [NONE], "boxed", "here.answer=hashes"),
        ([NONE] * 32, "boxed", "here.missing_answers=warn"),
        ([BOX] * 32, "tag", "here.answer=boxed"),
    ):
        with pytest.raises(ValueError) as stopped:
            looked(watch(answer=answer), texts, answer)
        assert named in str(stopped.value)
    own = watch()
    looked(own, [HASHES] * 24)
    with pytest.raises(ValueError):
        looked(own, [HASHES] * 8)
    own = watch()
    looked(own, [HASHES] * 24 + [BOX])
    looked(own, [HASHES] * 64)  # there has been an answer
    looked(watch(total=lambda counts: [counts[0] + 1, 64]), [NONE] * 8)
    with pytest.raises(ValueError):
        looked(watch(total=lambda counts: [counts[0], 64]), [NONE] * 8)


def test_a_low_share_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for choice, first in (("stop", [BOX] + [NONE] * 9), ("warn", [NONE] * 40)):
        caplog.clear()
        own = watch(choice)
        looked(own, first)
        for _ in range(3):
            looked(own, [NONE] * 9 + [BOX])
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    own = watch()
    looked(own, [BOX] + [NONE] * 4)  # a fifth
    looked(own, [])
    assert not caplog.records


def test_nothing_is_said_where_no_answer_is_read(caplog: pytest.LogCaptureFixture) -> None:
    looked(watch("ignore"), [NONE] * 40)
    looked(watch(method=build("uniform")), [NONE] * 40)
    looked(watch(method=build("surprisal", {"statistics": "response"})), [NONE] * 40)
    assert not caplog.records
