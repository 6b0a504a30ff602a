"""Generated passages in hand-written pages: a program writes the text between two marker lines."""

from __future__ import annotations

from pathlib import Path

from grail_advantage.dump import write_whole


def marked(text: str, name: str) -> str:
    """Returns the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``, without the line breaks around it.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    start, end = _bounds(text, name)
    return text[start:end].strip("\n")


def write_marked(path: Path, name: str, passage: str) -> None:
    """Put a passage between the markers of a file, in place of the old one; ValueError as for :func:`marked`."""
    text = path.read_text(encoding="utf-8")
    start, end = _bounds(text, name)
    write_whole(path, f"{text[:start]}\n{passage.strip()}\n{text[end:]}")


def _bounds(text: str, name: str) -> tuple[int, int]:
    begin = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the file needs the lines {begin} and {end}, once each and in this order")
    return text.index(begin) + len(begin), text.index(end)
