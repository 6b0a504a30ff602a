"""Answers in a text, found character by character, as the formats' definitions say; one character a byte."""

import re
from collections.abc import Callable

from tests.core.reference import boxed_spans, partner

Box = tuple[int, int, int, int]
EXPRESSION = r"Answer: (?P<content>[^.\n]*)"


def _tags(text: str) -> list[Box]:
    boxes = []
    at = 0
    pairs = (("<answer>", "</answer>"), ("<|begin_of_box|>", "<|end_of_box|>"))
    while at < len(text):
        for opener, closer in pairs:
            end = partner(text, at, opener, closer) if text.startswith(opener, at) else -1
            if end >= 0:
                boxes.append((at, at + len(opener), end, end + len(closer)))
                at = end + len(closer) - 1
                break
        at += 1
    return boxes


def _matches(expression: str) -> Callable[[str], list[Box]]:
    """Of Python's own expressions."""
    return lambda text: [
        (m.start(), *m.span("content"), m.end()) for m in re.finditer(expression, text)
    ]


PLAIN = {
    "boxed": boxed_spans,
    "hashes": _matches(r"#### (?P<content>-?[0-9.,]+)"),
    "tag": _tags,
    EXPRESSION: _matches(EXPRESSION),
}
"""By format."""


def plain_boxes(text: bytes, answer: str = "boxed") -> list[Box]:
    """All complete answers of a text."""
    return PLAIN[answer](text.decode("latin-1"))
