"""Write the tables of ``docs/published.md``, and the arguments of ``docs/trl.md``, from ``recipe/published.py``.

python scripts/published_page.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipe.marked_text import table, write_marked  # noqa: E402
from recipe.published import GROUPS, Setting, shown, trl_arguments  # noqa: E402

PAGES = {"published": ROOT / "docs" / "published.md", "trl_published": ROOT / "docs" / "trl.md"}


def settings_table() -> str:
    """Each published value, the options that say the same here, and what ``like=corrected`` has instead."""
    rows = [[f"*{group}*", "", "", "", ""] if setting is None else _row(setting) for group, setting in _settings()]
    return "\n".join(table(["setting", "theirs", "`published`", "`corrected`", "why it differs"], rows))


def _settings() -> list[tuple[str, Setting | None]]:
    return [(group, setting) for group, settings in GROUPS.items() for setting in (None, *settings)]


def _row(setting: Setting) -> list[str]:
    options = ", ".join(f"`{option.removeprefix('actor_rollout_ref.')}`" for option in setting.options)
    ours = options if setting.here is None or not setting.options else f"{options}: {shown(setting.here)}"
    theirs = f"`{shown(setting.theirs)}` ({setting.place})"
    corrected, _, why = setting.corrected.partition(": ")
    return [setting.name, theirs, ours, corrected, why or setting.why]


def trl_block() -> str:
    """The published arguments for one process, as Python."""
    values = trl_arguments(processes=1)
    arguments = "".join(f"    {name}={value!r},\n" for name, value in values.items())
    return f'<!-- run -->\n```python\nconfig = GRPOConfig(\n    "out",\n{arguments})\n```'.replace("'", '"')


PASSAGES = {"published": settings_table, "trl_published": trl_block}
"""By the names of their markers."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for marker, passage in PASSAGES.items():
        write_marked(PAGES[marker], marker, passage())


if __name__ == "__main__":
    main()
