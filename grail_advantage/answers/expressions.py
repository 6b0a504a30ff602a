"""Regular expressions of a user, matched with a time limit in texts that a model wrote."""

import time

import regex

CONTENT = "content"  # the group of an expression that holds what counts
SECONDS = 1.0  # an expression that takes longer on one response has no matches in it


def compile_expression(
    expression: str, option: str, *, may_be_empty: bool = False
) -> regex.Pattern[str]:
    """Compile an option's expression. ValueError, which names the option: it does not compile, or it matches the empty
    text and may not."""
    try:
        compiled = regex.compile(expression)
        matches_nothing = compiled.match("")
    except (regex.error, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{option}={expression!r:.200} does not compile: {error or type(error).__name__}"
        ) from error
    if matches_nothing and not may_be_empty:
        raise ValueError(
            f"{option}={expression!r} matches the empty text, and so everywhere; ask for a character"
        )
    return compiled


def find_matches(compiled: regex.Pattern[str], text: str) -> list[regex.Match[str]] | None:
    """All matches in order; ``None`` where that takes more than :data:`SECONDS` by the clock, or all memory.

    ``regex`` counts the processor time of all threads: with 63 busy ones a second would end after 16 ms. So it gets up
    to 8 times as much, as long as a second has not passed.
    """
    started = time.monotonic()
    for factor in (1, 2, 4, 8):
        try:
            return list(compiled.finditer(text, timeout=factor * SECONDS))
        except TimeoutError:
            if time.monotonic() - started >= SECONDS:
                break
        except (MemoryError, RecursionError):
            break
    return None
