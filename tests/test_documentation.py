"""What the pages promise: links lead somewhere, and every command is run by a test or marked as needing what tests lack.

A block of code says in the line above it, ``<!-- MARK -->``, what becomes of it:

- ``run``: a test runs it as it stands (``tests/documentation.py``);
- ``file: NAME``: a test writes and imports it;
- ``tested: FILE::TEST``: that test runs the same command or code;
- ``gpu``, ``hub``, ``other: WHY``: it needs a GPU, a download, or something else that the tests do not have.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
_FENCE = re.compile(r"^```(?P<language>\w*)\n.*?^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (?P<kind>run|gpu|hub|file|tested|other)(?:: (?P<what>[^>]+))? -->")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    titles = (heading["title"].lower() for heading in _HEADING.finditer(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.finditer(_prose(page)):
            target, _, anchor = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            there = file.exists() and ROOT in [file, *file.parents]
            if not there or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append((page.name, link["target"]))
    assert len(PAGES) > 10 and not broken


def test_every_block_of_code_says_what_becomes_of_it() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _FENCE.finditer(text):
            mark = _MARK.fullmatch(text[: block.start()].rstrip("\n").rsplit("\n", 1)[-1])
            if mark is None and block["language"] in ("bash", "python", "toml"):
                wrong.append(f"{page.name}:{text.count(chr(10), 0, block.start()) + 1} has no mark")
            elif mark and mark["kind"] == "tested":
                file, _, test = mark["what"].partition("::")
                path = ROOT / "tests" / file
                if not path.is_file() or f"def {test.split('::')[-1]}(" not in path.read_text(encoding="utf-8"):
                    wrong.append(f"{page.name} names {mark['what']}, which is not there")
    assert not wrong


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.parent == ROOT / "docs" and f"({page.name})" not in index]
    assert missing == ["README.md"]
