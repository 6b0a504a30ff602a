"""Code blocks of the documentation, so that tests run what a reader copies."""

import re
from pathlib import Path

from tests.clone import ROOT

DOCS = ROOT / "docs"
READ = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
"""What a user reads: neither changes nor the ledgers of development."""
FOLDERS = {
    "own_trainer.md": ROOT / "examples/trainer",
    "trl.md": ROOT / "examples/trl",
    "write_your_own.md": ROOT / "examples/methods",
}
_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```python\n(?P<text>.*?)```", re.DOTALL)


def files(page: str) -> dict[str, str]:
    """The blocks of a page that are marked as files, by name, and the files of its folder of examples."""
    text = (DOCS / page).read_text()
    texts = {match["name"]: match["text"] for match in _FILE.finditer(text)}
    if page not in FOLDERS:
        return texts
    complete = {
        file.name: file.read_text() for file in FOLDERS[page].iterdir() if file.is_file()
    }
    assert texts.items() <= complete.items(), (
        f"{page} shows what the files of its folder are not"
    )
    return complete


def write_files(page: str, folder: Path):
    """Write them into a folder."""
    for name, text in files(page).items():
        (folder / name).write_text(text)


def snippets(page: str) -> list[str]:
    """The blocks of a page that are marked to be run."""
    return [matches["text"] for matches in _RUN.finditer((DOCS / page).read_text())]
