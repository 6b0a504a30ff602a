"""The tables of ``docs/faults.md``, from ``tests/faults.py``; ``python scripts/fault_table.py`` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # tests/ is not installed

from recipe.marked_text import write_marked  # noqa: E402
from tests.faults import FAULTS, SECTIONS, Fault  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
MARKER = "faults"


def tables() -> str:
    """A table for each section, in Markdown."""
    return "\n\n".join(
        f"## {about}\n\n{_table([fault for fault in FAULTS if fault.about == about])}" for about in SECTIONS
    )


def _table(faults: list[Fault]) -> str:
    lines = ["| what goes wrong | where | what becomes of it | shown by |", "|---|---|---|---|"]
    for fault in faults:
        cells = (fault.fault, fault.place, fault.outcome, ", ".join(map(_shown, fault.proof)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(proof: str) -> str:
    if proof.startswith("docs/"):
        path = proof.removeprefix("docs/")
        return f"[recorded run]({path})"
    return f"`{proof}`"


if __name__ == "__main__":
    write_marked(PAGE, MARKER, tables())
