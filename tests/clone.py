"""What lies in the clone, so that a test which leaves something there is noticed."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_TOOLS = {
    ".git",
    ".venv",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    "mutants",
}
WRITTEN_TO = {"outputs", "data", "results", "seen", "checkpoints", "gsm8k"}
"""Folders into which the commands of the pages write."""


def files(root: Path = ROOT) -> dict[Path, int]:
    """The files of a clone, but for those of tools, with the nanosecond of their last change."""
    sizes = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in OF_TOOLS]
        for name in names:
            path = Path(folder, name)
            sizes[path.relative_to(root)] = path.lstat().st_mtime_ns
    return sizes


def changed(old: Mapping[Path, int], new: Mapping[Path, int]) -> list[str]:
    """The files that are new anywhere, and those that are other or gone where commands write: an editor may save the rest."""
    lines = [f"{path} (new)" for path in new.keys() - old.keys()]
    for path in old:
        if path.parts[0] in WRITTEN_TO and old[path] != new.get(path):
            lines.append(f"{path} ({'changed' if path in new else 'gone'})")
    return sorted(lines)
