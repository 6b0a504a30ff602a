"""Code blocks of the documentation, so that tests run what a reader copies."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = {
    "own_trainer.md": ROOT / "examples/trainer",
    "trl.md": ROOT / "examples/trl",
    "write_your_own.md": ROOT / "examples/methods",
}
_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```python\n(?P<text>.*?)```", re.DOTALL)
_BASH = re.compile(r"^```bash\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """The blocks of a page that are marked as files, by name, and the files of its folder of examples."""
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = {found["name"]: found["text"] for found in _FILE.finditer(text)}
    if page in FOLDERS:
        whole = {file.name: file.read_text(encoding="utf-8") for file in FOLDERS[page].iterdir() if file.is_file()}
        assert shown.items() <= whole.items(), f"{page} shows what the files of its folder are not"
        return whole
    return shown


def write_files(page: str, folder: Path) -> None:
    """Write them into a folder."""
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def snippets(page: str) -> list[str]:
    """The blocks of a page that are marked to be run."""
    return [found["text"] for found in _RUN.finditer((DOCS / page).read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Command:
    """One command of a block of bash."""

    variables: dict[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> Path | None:
        """The file of this project that it starts; none if it starts another program, or verl."""
        if self.words[0] in ("python", "python3", "bash") and self.words[1] != "-c":
            name = self.words[1]
            if name == "-m":
                module = ROOT / self.words[2].replace(".", "/")
                return next((f for f in (module.with_suffix(".py"), module / "__main__.py") if f.exists()), None)
            return ROOT / name
        return None

    def overrides(self) -> list[str]:
        """Its Hydra overrides."""
        return [word for word in self.words[3:] if "=" in word]


def commands(page: Path) -> Iterator[Command]:
    """Every command in a page's blocks of bash."""
    for block in _BASH.finditer(page.read_text(encoding="utf-8")):
        for line in block["text"].replace("\\\n", " ").replace("$PWD", "/work").splitlines():
            for part in re.split(r" (?:&&|\|) (?=cd |bash |python)", line):
                words = shlex.split(part, comments=True)
                if not words:
                    continue
                first = next(place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
                variables = dict(word.split("=", 1) for word in words[:first])
                if words[first] != "cd":
                    yield Command(variables, tuple(words[first:]))
