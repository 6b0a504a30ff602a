"""Code blocks of the documentation, so that tests run what a reader copies."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```python\n(?P<text>.*?)```", re.DOTALL)


def files(page: str) -> dict[str, str]:
    """The blocks of a page that are marked as files, by name."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return {found["name"]: found["text"] for found in _FILE.finditer(text)}


def write_files(page: str, folder: Path) -> None:
    """Write them into a folder."""
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def snippets(page: str) -> list[str]:
    """The blocks of a page that are marked to be run."""
    return [found["text"] for found in _RUN.finditer((DOCS / page).read_text(encoding="utf-8"))]
