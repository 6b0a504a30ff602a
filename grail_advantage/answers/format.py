r"""The formats in which a response states its answer, and where a text holds them.

- ``boxed``: ``\boxed{42}`` with balanced braces; the content is between the outer ones;
- ``hashes``: ``#### 42``, as verl's GSM8K reward reads it; the number;
- ``tag``: ``<answer>42</answer>`` or ``<|begin_of_box|>42<|end_of_box|>``; between the tags;
- an expression: every match of a regular expression; its named group ``content``.

An answer that is not complete is none, and the search resumes right after its beginning; an answer inside a complete
one is none of its own. ``hashes`` and an expression need no end: a response that was cut off in the number has an
answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import regex

from grail_advantage.answers.expressions import CONTENT, compile_expression, find_matches

Box: TypeAlias = tuple[int, int, int, int]
"""``(start, content_start, content_end, end)``, byte offsets: the answer is ``text[start:end]``."""

# A row break, a brace as a sign, a group's end
_BOX_TOKENS = re.compile(rb"\\\\(?!boxed\{)|\\[{}]|(\\boxed\{|[{}])")
_TAGS = (
    (b"<answer>", b"</answer>", re.compile(rb"(</?answer>)")),
    (b"<|begin_of_box|>", b"<|end_of_box|>", re.compile(rb"(<\|(?:begin|end)_of_box\|>)")),
)
_HASHES = re.compile(rb"#### (-?[0-9.,]+)")  # verl/utils/reward_score/gsm8k.py, method strict


@dataclass(frozen=True)
class AnswerFormat:
    """A format, made by :func:`answer_format`: ``boxed``, ``hashes``, ``tag`` or the expression, with an example."""

    name: str
    example: str
    find: Callable[[bytes], Iterator[Box]] = field(compare=False, repr=False)
    """Yields every complete answer of a text in order: UTF-8 or any other superset of ASCII, valid or not."""
    matters: Callable[[bytes], bool] = field(
        compare=False, repr=False, default=lambda covered: True
    )
    """Whether a token with these bytes can be a part of an answer's beginning or end, or stand between such parts. The
    search sees a space for the others."""
    markers: frozenset[str] = frozenset()
    """Special tokens with one of these names stand in the text that is searched. No other special token does."""


def answer_format(choice: str | AnswerFormat) -> AnswerFormat:
    """The format of ``boxed``, ``hashes``, ``tag``, or of a regular expression in Python's syntax with a group
    ``(?P<content>...)``, which is matched in the whole text of a response; a format is returned as it is.

    Raises:
        ValueError: neither a name nor an expression that works; with the remedy.
    """
    if isinstance(choice, AnswerFormat):
        return choice
    choice = str(choice)
    if choice in FORMATS:
        return FORMATS[choice]
    try:
        expression = compile_expression(choice, "answer", may_be_empty=True)
        if CONTENT not in expression.groupindex:
            raise ValueError(f"answer={choice!r} has no group (?P<{CONTENT}>...)")
    except ValueError as error:
        remedy = f"use {', '.join(FORMATS)}, or a regular expression with a group for the answer's content, such as "
        raise ValueError(
            rf"{error}, and is no format; {remedy}'Answer: (?P<{CONTENT}>.+)'"
        ) from error
    return AnswerFormat(choice, choice, partial(_matches, expression))


def iter_boxed(text: bytes) -> Iterator[Box]:
    r"""Yield every complete ``\boxed{...}`` of ``text``, in order, in time linear in the text.

    A box whose braces never balance is skipped. A box inside a complete box is part of it. As in LaTeX, ``\{`` and
    ``\}`` are signs and no braces, so that ``\left\{ x=1 \right.`` may stand in a box, and ``\\`` is a row break.
    """
    return _outermost(_balanced(text, rb"\boxed{", b"}", _BOX_TOKENS))


def _balanced(text: bytes, opener: bytes, closer: bytes, tokens: re.Pattern[bytes]) -> list[Box]:
    """Every ``opener`` with its partner, in order; the group of ``tokens`` matches what opens and closes."""
    # One pass with a stack: counting anew from each opener takes quadratic time on a text that repeats an unclosed one.
    boxes = []
    opened = []
    for match in tokens.finditer(text, max(0, text.find(opener))):
        if match[1] and match[1] != closer:
            opened.append(match)
        elif match[1] and opened and (start := opened.pop())[1] == opener:
            boxes.append((*start.span(), *match.span()))
    return sorted(boxes)


def _outermost(boxes: Iterable[Box]) -> Iterator[Box]:
    searched_to = 0
    for box in boxes:
        if box[0] >= searched_to:
            searched_to = box[3]
            yield box


def _tagged(text: bytes) -> Iterator[Box]:
    """Answers in tags. Tags of one kind nest like braces."""
    boxes = []
    for tags in _TAGS:
        boxes += _balanced(text, *tags)
    return _outermost(sorted(boxes))


def _hashed(text: bytes) -> Iterator[Box]:
    return ((match.start(), *match.span(1), match.end()) for match in _HASHES.finditer(text))


def _matches(expression: regex.Pattern[str], text: bytes) -> Iterator[Box]:
    """In bytes. A match without text, or whose group took no part, is no answer; none where matching takes too long."""
    # A byte that is no UTF-8 becomes one character, so that every character has its own bytes.
    characters = text.decode("utf-8", "surrogateescape")
    matches = find_matches(expression, characters)
    if not matches:
        return
    byte_of = [
        0,
        *accumulate(len(character.encode("utf-8", "surrogateescape")) for character in characters),
    ]
    for match in matches:
        start, end = match.span(CONTENT)
        # A group inside a look-around lies outside the match.
        ends = min(match.start(), start), start, end, max(match.end(), end)
        if start >= 0 and ends[0] < ends[3]:
            yield byte_of[ends[0]], byte_of[start], byte_of[end], byte_of[ends[3]]


def _matters_to_box(covered: bytes) -> bool:
    r"""Whether a token has one of the bytes ``\{}``, or is a part of ``boxed``, the empty one included: any other can
    neither open, close nor complete a box."""
    return covered in b"boxed" or any(byte in covered for byte in b"\\{}")


BOXED = AnswerFormat("boxed", r"\boxed{42}", iter_boxed, _matters_to_box)
_MARKERS = frozenset({"<answer>", "</answer>", "<|begin_of_box|>", "<|end_of_box|>"})
FORMATS = {
    "boxed": BOXED,
    "hashes": AnswerFormat("hashes", "#### 42", _hashed),
    "tag": AnswerFormat("tag", "<answer>42</answer>", _tagged, markers=_MARKERS),
}
