"""The tokens of a response as lines of characters of equal width."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple


class Piece(NamedTuple):
    """A token, or the part of it on one line, and its half-open range of the line's cells."""

    token: int
    start: int
    end: int
    text: str


def wrap(texts: Sequence[str], columns: int) -> list[list[Piece]]:
    """Tokens as lines of so many cells, and one for a space at the end: broken at line breaks and after spaces, else between
    tokens, else anywhere."""
    lines: list[list[tuple[int, str, int]]] = [[]]
    for token, character in ((token, character) for token, text in enumerate(texts) for character in text):
        line = lines[-1]
        if character == "\n":
            lines.append([])
            continue
        flat = unicodedata.category(character) in ("Mn", "Me", "Cf")
        cells = 0 if flat else 1 + (unicodedata.east_asian_width(character) in "WF")
        if line and sum(cell[2] for cell in line) + cells > columns + (character == " "):
            ends, owners = range(1, len(line) + 1), [*(cell[0] for cell in line), token]
            after_spaces = [end for end in ends if line[end - 1][1] == " "]
            cut = max(after_spaces or [end for end in ends if owners[end - 1] != owners[end]] or ends)
            lines[-1:] = [line[:cut], line[cut:]]
        lines[-1].append((token, character, cells))
    wrapped: list[list[Piece]] = []
    for line in filter(None, lines):
        end, pieces = 0, []
        for token, parts in groupby(line, key=lambda cell: cell[0]):
            _, characters, widths = zip(*parts, strict=True)
            start, end = end, end + sum(widths)
            pieces.append(Piece(token, start, end, "".join(characters)))
        wrapped.append(pieces)
    return wrapped


def kept(lines: Sequence[Sequence[Piece]], most: int, marked: range) -> list[int]:
    """Numbers of the lines that are drawn: all, or as many of the first, from the mark on, and of the last."""
    if len(lines) <= most:
        return list(range(len(lines)))
    third, last = max(1, most // 3), len(lines)
    place = next((number for number, line in enumerate(lines) if any(piece.token in marked for piece in line)), third)
    return sorted({*range(third), *range(place, min(last, place + third)), *range(last - third, last)})
