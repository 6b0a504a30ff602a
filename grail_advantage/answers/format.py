r"""The formats in which a response states its answer, and where a text holds them.

========== ================================================== ==============================================================
format     an answer                                          content
========== ================================================== ==============================================================
``boxed``  ``\boxed{42}`` with balanced braces                between the outer braces
``hashes`` ``#### 42``, as verl's GSM8K reward reads it       the number
``tag``    ``<answer>42</answer>``, or                        between the tags
           ``<|begin_of_box|>42<|end_of_box|>``
expression every match of a regular expression                its named group ``content``
========== ================================================== ==============================================================

An answer that is not complete is none, and the search resumes right after its beginning; an answer inside a complete one is
none of its own. ``hashes`` and an expression need no end: a response that was cut off inside the number has a complete answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeAlias

import regex

from grail_advantage.answers.expressions import CONTENT, find_matches

Box: TypeAlias = tuple[int, int, int, int]
"""``(start, content_start, content_end, end)``, byte offsets: the answer is ``text[start:end]``."""

_BOX_TOKENS = re.compile(
    rb"\\\\(?!boxed\{)|\\[{}]|(\\boxed\{|[{}])"
)  # a row break, a brace to be seen, or a group's end
_TAGS = ((b"<answer>", b"</answer>"), (b"<|begin_of_box|>", b"<|end_of_box|>"))
_HASHES = re.compile(rb"#### (-?[0-9.,]+)")  # verl/utils/reward_score/gsm8k.py, method strict


@dataclass(frozen=True)
class AnswerFormat:
    """A format, made by :func:`answer_format`."""

    name: str
    """``boxed``, ``hashes``, ``tag``, or the expression itself."""
    example: str
    """An answer in this format, for messages."""
    find: Callable[[bytes], Iterator[Box]] = field(compare=False, repr=False)
    """Yields every complete answer of a text in order: UTF-8 or any other superset of ASCII, valid or not."""
    matters: Callable[[bytes], bool] = field(compare=False, repr=False, default=lambda covered: True)
    """Whether a token with these bytes can be a part of an answer's beginning or end, or stand between such parts. In the place
    of others the search sees a space."""
    markers: frozenset[str] = frozenset()
    """Special tokens with one of these names stand in the text that is searched. No other special token does."""


def answer_format(choice: str | AnswerFormat) -> AnswerFormat:
    """The format of a name or an expression; a format is returned as it is.

    Args:
        choice: ``boxed``, ``hashes``, ``tag``, or a regular expression in Python's syntax with a group
            ``(?P<content>...)``. It is matched in the whole text of a response.

    Raises:
        ValueError: neither a name nor an expression that works; with the remedy.
    """
    if isinstance(choice, AnswerFormat):
        return choice
    return _resolved(choice if isinstance(choice, str) else repr(choice))


@cache
def _resolved(choice: str) -> AnswerFormat:
    if choice in FORMATS:
        return FORMATS[choice]
    remedy = (
        f"use {', '.join(FORMATS)}, or a regular expression with a group for the answer's content, such as "
        rf"'Answer: (?P<{CONTENT}>.+)'"
    )
    try:
        expression = regex.compile(choice)
    except (regex.error, RecursionError, MemoryError, OverflowError) as error:
        reason = error or type(error).__name__
        raise ValueError(f"answer={choice!r:.200} is no format and does not compile ({reason}); {remedy}") from error
    if CONTENT not in expression.groupindex:
        raise ValueError(f"answer={choice!r} is no format and has no group (?P<{CONTENT}>...); {remedy}")
    return AnswerFormat(choice, choice, partial(_matches, expression))


def iter_boxed(text: bytes) -> Iterator[Box]:
    r"""Yield every complete ``\boxed{...}`` of ``text``, in order, in time linear in the text.

    A span whose braces never balance is skipped and the search resumes right after its ``\boxed{``; after a complete
    span the search resumes at its end, so a box inside a complete box is not a span of its own.

    As in LaTeX, ``\{`` and ``\}`` are signs and no braces, so that ``\left\{ x=1 \right.`` may stand in a box, and ``\\`` is a
    row break.
    """
    return _outermost(_balanced(text, rb"\boxed{", b"}", _BOX_TOKENS))


def _balanced(text: bytes, opener: bytes, closer: bytes, tokens: re.Pattern[bytes]) -> list[Box]:
    """Every ``opener`` with its partner, in order; the group of ``tokens`` matches it, ``closer`` and what else this closes."""
    first = text.find(opener)
    if first < 0:
        return []
    # One pass with a stack finds every partner. Counting anew from each opener would find the same ones, but takes quadratic
    # time on a text that repeats an unclosed opener.
    boxes: list[int] = []
    closed_at: dict[int, int] = {}
    opened: list[int] = []
    for match in tokens.finditer(text, first):
        at = match.start()
        if match[1] == closer:
            if opened:
                closed_at[opened.pop()] = at
        elif match[1]:
            opened.append(at)
            if match[1] == opener:
                boxes.append(at)
    return [(box, box + len(opener), closed_at[box], closed_at[box] + len(closer)) for box in boxes if box in closed_at]


def _outermost(boxes: Sequence[Box]) -> Iterator[Box]:
    searched_to = 0
    for box in boxes:
        if box[0] >= searched_to:
            searched_to = box[3]
            yield box


def _tagged(text: bytes) -> Iterator[Box]:
    """Answers in tags. Tags of one kind nest like braces."""
    boxes: list[Box] = []
    for opener, closer in _TAGS:
        boxes += _balanced(text, opener, closer, re.compile(b"(" + re.escape(opener) + b"|" + re.escape(closer) + b")"))
    return _outermost(sorted(boxes))


def _hashed(text: bytes) -> Iterator[Box]:
    return ((match.start(), match.start(1), match.end(), match.end()) for match in _HASHES.finditer(text))


def _matches(expression: regex.Pattern[str], text: bytes) -> Iterator[Box]:
    """The matches of an expression, in bytes. One without text, or whose group took no part, is no answer; none where matching
    takes too long."""
    # A byte that is no UTF-8 becomes one character, so that every character has its own bytes.
    characters = text.decode("utf-8", "surrogateescape")
    at_byte = at_character = 0
    for match in find_matches(expression, characters) or ():
        content = match.span(CONTENT)
        # A group inside a look-around lies outside the match.
        ends = min(match.start(), content[0]), *content, max(match.end(), content[1])
        if content[0] < 0 or ends[0] == ends[3]:
            continue
        edges = []
        for end in ends:
            first, last = sorted((at_character, end))
            width = len(characters[first:last].encode("utf-8", "surrogateescape"))
            at_byte, at_character = at_byte + (width if end >= at_character else -width), end
            edges.append(at_byte)
        yield edges[0], edges[1], edges[2], edges[3]


def _matters_to_box(covered: bytes) -> bool:
    r"""Whether a token has one of the bytes ``\{}``, or may come between ``\`` and ``{``: it is a part of ``boxed``, the empty
    one included. Any other can neither open, close nor complete a box."""
    return covered in b"boxed" or any(byte in covered for byte in b"\\{}")


FORMATS = {
    each.name: each
    for each in (
        AnswerFormat("boxed", r"\boxed{42}", iter_boxed, _matters_to_box),
        AnswerFormat("hashes", "#### 42", _hashed),
        AnswerFormat(
            "tag",
            "<answer>42</answer>",
            _tagged,
            markers=frozenset(tag.decode() for tags in _TAGS for tag in tags),
        ),
    )
}
"""By name."""
BOXED = FORMATS["boxed"]
