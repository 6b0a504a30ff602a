"""Reads files and prints texts that others wrote, and makes Markdown tables.

What is no plain file, is too large or holds no JSON raises, and nothing waits for a pipe. In a text, what would act on
a terminal or hide in a page becomes visible. The module is a folder, as the wheel token-receipt ships it within its
own package.
"""

import json
import math
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

LARGEST = 2**31
"""A file of lines has at most so many bytes."""
LARGEST_JSON = 2**26
"""One JSON value has at most so many bytes; its objects take many times as much."""
DEEPEST = 100
"""Lists and objects within each other, at most: what reads a value calls itself for each."""
_DECODER = json.JSONDecoder(
    parse_int=lambda digits: int(digits) if len(digits) < 309 else float(digits)
)
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of controls, formats, halves of surrogate pairs, and characters that nobody has assigned."""
_SUSPECT = re.compile(r"[^\x20-\x7e\u00a1-\u00ac\u00ae-\u02ff\u0370-\u0377]")
"""Everything outside the plain text that needs no second look."""
LINE_BREAK = "\u21b5"


def plain_file(path: Path) -> Path:
    """The path, where it is a plain file's; :func:`open_plain` opens one.

    Raises:
        OSError: it is not there, or may not be read.
        ValueError: it is something else, such as a folder, a pipe or a device.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no plain file")
    return path


def open_plain(path: Path) -> BinaryIO:
    """A :func:`plain_file`, open for reading, which never waits; the log of the kernel is an empty one."""
    return open(
        plain_file(path),
        "rb",
        opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
    )


def read_bytes(path: Path) -> bytes:
    """The content of a plain file; of one that grows meanwhile what was there. ValueError: it is none, or too large."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise ValueError(f"has {size:,} bytes, more than {LARGEST:,}")
        return file.read(size)


def read_json(content: bytes | str) -> Any:
    """A JSON value. A whole number beyond the floats is infinite.

    Raises:
        ValueError: it is none, nests too deeply, or is too large.
    """
    if len(content) > LARGEST_JSON:
        raise ValueError(f"has {len(content):,} bytes, more than {LARGEST_JSON:,}")
    try:
        value = _DECODER.decode(content if isinstance(content, str) else content.decode())
    except RecursionError:
        raise ValueError("nests too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        inner = [
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        ]
        level = [value for values in inner for value in values]
    if level:
        raise ValueError("nests too deeply")
    return value


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of JSON lines that are not empty, with their numbers from 1; errors as :func:`read_bytes`."""
    lines = enumerate(read_bytes(path).split(b"\n"), start=1)
    return ((number, line) for number, line in lines if line.strip())


def why(error: Exception) -> str:
    """An error's message in one line, short, without the path that an ``OSError`` names."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


def visible(text: str, *, breaks: bool = False) -> str:
    """The text with its invisible characters spelt out: control pictures (``\u2400`` for NUL), or ``<U+202E>``.

    A line break becomes ``\u21b5``, and a line break behind it where ``breaks`` is set.
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


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, each as one that is :func:`visible`; a character that the terminal's encoding lacks as an escape."""
    file = file or sys.stdout
    for line in lines:
        encoding = getattr(file, "encoding", None) or "utf-8"
        text = visible(line).encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=file, flush=True)


def complain(command: str, *lines: str) -> None:
    """Say lines on the error stream, each after the command's name."""
    say(*(f"{command}: {line}" for line in lines), file=sys.stderr)


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], right: float = math.inf
) -> list[str]:
    """Lines of a Markdown table; columns from ``right`` on are set flush right."""
    rule = ["--:" if column >= right else "---" for column in range(len(head))]
    cells = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]
