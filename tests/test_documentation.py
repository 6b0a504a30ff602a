"""What the pages promise: links lead somewhere, and every command is run by a test or marked as needing what tests lack.

A block of code says in the line above it, ``<!-- MARK -->``, what becomes of it:

- ``run``: a test runs it as it stands (``tests/documentation.py``);
- ``file: NAME``: a test writes and imports it;
- ``tested: FILE::TEST``: that test runs the same command or code;
- ``gpu``, ``hub``, ``other: WHY``: it needs a GPU, a download, or something else that the tests do not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")],
)
CODE = ("bash", "python", "toml")
_FENCE = re.compile(r"^```(?P<language>\w*)\n.*?^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (?P<kind>run|gpu|hub|file|tested|other)(?:: (?P<what>[^>]+))? -->")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, language and the line above of each block of code."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rsplit("\n", 1)[-1]
        yield text.count("\n", 0, found.start()) + 1, found["language"], before


def _anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in _HEADING.finditer(text):
        plain = re.sub(r"[^\w\- ]", "", heading["title"].lower()).replace(" ", "-")
        found.add(plain)
    return found


def test_there_are_pages() -> None:
    assert {"README.md", "docs/README.md", "docs/methods.md"} <= {_name(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in _LINK.finditer(text):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        there = file.exists() and ROOT in [file, *file.parents]
        if not there or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(link["target"])
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_of_code_says_what_becomes_of_it(page: Path) -> None:
    unmarked = [
        f"{_name(page)}:{line}"
        for line, language, before in _blocks(page)
        if language in CODE and not _MARK.fullmatch(before)
    ]
    assert not unmarked


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for line, _, before in _blocks(page):
        mark = _MARK.fullmatch(before)
        if mark and mark["kind"] == "tested":
            file, _, test = mark["what"].partition("::")
            path = ROOT / "tests" / file
            assert path.is_file(), f"{_name(page)}:{line} names {file}"
            assert re.search(rf"def {re.escape(test.split('::')[-1])}\(", path.read_text(encoding="utf-8")), (
                f"{_name(page)}:{line} names {test}, which {file} lacks"
            )


@pytest.mark.parametrize("page", [ROOT / "docs" / "README.md"], ids=_name)
def test_the_index_names_every_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [_name(other) for other in PAGES if other.parent == page.parent and f"({other.name})" not in text]
    assert missing == ["docs/README.md"]
