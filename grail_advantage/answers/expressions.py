"""Regular expressions of a user, matched with a time limit in texts that a model wrote."""

from __future__ import annotations

import regex

CONTENT = "content"
"""The group of an expression that holds what counts."""
SECONDS = 1.0
"""An expression that takes longer on one response has no matches in it."""


def compile_expression(expression: str, option: str) -> regex.Pattern[str]:
    """Compile an option's expression.

    Raises:
        ValueError: it does not compile or matches the empty text; the message names the option.
    """
    try:
        compiled = regex.compile(expression)
    except regex.error as error:
        raise ValueError(f"{option}={expression!r} does not compile: {error}") from error
    if compiled.match(""):
        raise ValueError(f"{option}={expression!r} matches the empty text, and so everywhere; ask for a character")
    return compiled


def find_matches(compiled: regex.Pattern[str], text: str) -> list[regex.Match[str]] | None:
    """All matches in order; ``None`` where that takes longer than :data:`SECONDS`."""
    try:
        return list(compiled.finditer(text, timeout=SECONDS))
    except TimeoutError:
        return None
