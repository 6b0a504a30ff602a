"""Generated passages in hand-written pages: a program writes the text between two marker lines."""

from pathlib import Path

from grail_advantage.dump import write_whole


def marked(text: str, name: str) -> str:
    """Returns the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``, without the line breaks around it.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    _, passage, _ = _split(text, name)
    return passage.strip("\n")


def write_marked(path: Path, name: str, passage: str) -> None:
    """Put a passage between the markers of a file, in place of the old one; ValueError as for :func:`marked`."""
    head, _, tail = _split(path.read_text(encoding="utf-8"), name)
    write_whole(path, f"{head}\n{passage.strip()}\n{tail}")


def _split(text: str, name: str) -> tuple[str, str, str]:
    """Returns the text up to a passage, with its first marker, the passage, and the rest from the second marker on."""
    begin = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    passage, _, tail = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end not in rest:
        raise ValueError(f"the file needs the lines {begin} and {end}, once each and in this order")
    return head + begin, passage, end + tail
