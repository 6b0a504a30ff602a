"""Write the list of patches in ``docs/what_installing_changes.md`` from the docstrings of the files ``patches.py``.

    python scripts/patches_page.py

A function or class is listed if its docstring says when it can go.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipe.marked_text import table, write_marked  # noqa: E402

PAGE, MARKER = ROOT / "docs" / "what_installing_changes.md", "patches"
FILES = {
    "grail_advantage/verl_ext/patches.py": "verl",
    "packages/verl-cpu/verl_cpu/patches.py": "verl and torch, by `packages/verl-cpu` with `VERL_PLATFORM=cpu` alone",
    "grail_advantage/model/patches.py": "torch and transformers, within a pass of a method alone",
    "grail_advantage/trl_ext/trainer.py": "TRL, of which nothing is replaced",
}
CAN_GO = "Can go "


def page() -> str:
    """A table for each file."""
    lines: list[str] = []
    for name, heading in FILES.items():
        rows = []
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            docstring = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
            if CAN_GO in " ".join(docstring.split()):
                rows.append([f"`{node.name}`", *reasons(docstring)])
        lines += [f"### {heading}", "", f"[`{name}`](../{name})", ""]
        lines += [*table(["function", "what and why", "can go"], rows), ""]
    return "\n".join(lines).rstrip()


def reasons(docstring: str) -> tuple[str, str]:
    """What a docstring says of a patch, and from when on it is not needed."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", inspect.cleandoc(docstring).replace("``", "`"))
    why, _, going = " ".join(text.split("\nArgs:")[0].split()).partition(CAN_GO)
    return why.strip(), going.strip().rstrip(".")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_marked(PAGE, MARKER, page())


if __name__ == "__main__":
    main()
