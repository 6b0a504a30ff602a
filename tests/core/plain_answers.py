"""Answers in a text, found character by character, as the formats' definitions say; one character a byte."""

from __future__ import annotations

from tests.core.reference import boxed_spans, partner

Box = tuple[int, int, int, int]
EXPRESSION = r"Answer: (?P<content>[^.\n]*)"


def _hashes(text: str) -> list[Box]:
    boxes, at = [], text.find("#### ")
    while at >= 0:
        first = end = at + 5
        digits = first + 1 if text[first : first + 1] == "-" else first
        end = digits
        while end < len(text) and text[end] in "0123456789.,":
            end += 1
        if end > digits:
            boxes.append((at, first, end, end))
        at = text.find("#### ", max(end, at + 1) if end > digits else at + 1)
    return boxes


def _tags(text: str) -> list[Box]:
    boxes, at = [], 0
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


def _expressed(text: str) -> list[Box]:
    boxes, at = [], text.find("Answer: ")
    while at >= 0:
        first = end = at + 8
        while end < len(text) and text[end] not in ".\n":
            end += 1
        boxes.append((at, first, end, end))
        at = text.find("Answer: ", end)
    return boxes


PLAIN = {"boxed": boxed_spans, "hashes": _hashes, "tag": _tags, EXPRESSION: _expressed}
"""By format."""


def plain_boxes(text: bytes, answer: str = "boxed") -> list[Box]:
    """All complete answers of a text."""
    return PLAIN[answer](text.decode("latin-1"))
