"""Runs whose responses have no answers stop, or are warned of, with the remedy."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from grail_advantage import Grail, Method
from grail_advantage.answers.format import answer_format
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.method import build
from tests.core.common import rollouts_of
from tests.core.tiny_models import encode

HASHES, BOX, NONE = "so #### 42", r"so \boxed{42}", "so 42"


def looked(watch: AnswerCheck, texts: list[str], answer: str = "boxed") -> None:
    r = rollouts_of(list(map(encode, texts)), [0.0] * len(texts))
    watch.look(replace(r, known_spans={}, answer=answer_format(answer)))


def watch(choice: str = "stop", method: Method | None = None, answer: str = "boxed", **given: Any) -> AnswerCheck:
    return AnswerCheck(method or Grail(), answer_format(answer), choice, "here.", **given)


def test_a_first_batch_without_answers_stops() -> None:
    """It names the format that has them; a small batch without answers is bad luck, and all processes count together."""
    for texts, answer, named in (
        ([HASHES] * 31 + [NONE], "boxed", "here.answer=hashes"),
        ([NONE] * 32, "boxed", "here.missing_answers=warn"),
        ([BOX] * 32, "tag", "here.answer=boxed"),
    ):
        with pytest.raises(ValueError, match=named):
            looked(watch(answer=answer), texts, answer)
    for first, stops in (([HASHES] * 24, True), ([HASHES] * 24 + [BOX], False)):
        own = watch()
        looked(own, first)
        if stops:
            with pytest.raises(ValueError):
                looked(own, [HASHES] * 8)
        else:
            looked(own, [HASHES] * 64)
    looked(watch(total=lambda counts: [counts[0] + 1, 64]), [NONE] * 8)
    with pytest.raises(ValueError):
        looked(watch(total=lambda counts: [counts[0], 64]), [NONE] * 8)


def test_a_low_share_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A fifth is not low, and a method that reads no answer needs none."""
    for own, first, warnings in (
        (watch("stop"), [BOX] + [NONE] * 9, 1),
        (watch("warn"), [NONE] * 40, 1),
        (watch("stop"), [BOX] + [NONE] * 4, 0),
        (watch("ignore"), [NONE] * 40, 0),
        (watch(method=build("uniform")), [NONE] * 40, 0),
        (watch(method=build("surprisal", {"statistics": "response"})), [NONE] * 40, 0),
    ):
        caplog.clear()
        looked(own, first)
        for _ in range(3):
            looked(own, first if not warnings else [NONE] * 9 + [BOX])
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warnings
