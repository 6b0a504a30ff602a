"""Model text that is safe to look at: what would act on a terminal or hide in a page becomes visible."""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of controls (terminal escapes, NUL), formats (direction marks, zero width), halves of surrogate pairs, and
characters that nobody has assigned."""
_SUSPECT = re.compile(r"[^\x20-\x7e\u00a1-\u00ac\u00ae-\u02ff\u0370-\u0377]")
"""Everything outside the plain text that needs no second look."""
LINE_BREAK = "\u21b5"


def visible(text: str, *, breaks: bool = True) -> str:
    """The text with its invisible characters spelt out: control pictures (``\u2400`` for NUL), ``<U+202E>`` for the others.

    Args:
        text: anything a model may write, half surrogate pairs included.
        breaks: a line break becomes ``\u21b5`` and a line break; otherwise ``\u21b5`` alone.
    """

    def spell(match: re.Match[str]) -> str:
        character = match[0]
        code = ord(character)
        if character == "\n":
            return LINE_BREAK + ("\n" if breaks else "")
        if code < 0x20:
            return chr(0x2400 + code)
        if code == 0x7F:
            return "\u2421"
        if character == "\u200d" or unicodedata.category(character) not in _HIDDEN:
            # A zero-width joiner is part of many emoji, and alone does no harm.
            return character
        return f"<U+{code:04X}>"

    return _SUSPECT.sub(spell, text)
