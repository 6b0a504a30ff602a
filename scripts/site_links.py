"""A hook of mkdocs. The site begins with the front page's first screen; links to files outside the site go to the repository.

The repository's address is the entry ``Repository`` of ``project.urls`` in ``pyproject.toml``, which is set at publication.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOME = "README.md"
LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the first screen before the list of pages, and point links that leave the site to the repository."""
    if page.file.src_uri == HOME:
        markdown = f"{first_screen()}\n{markdown.replace('# Pages', '## Pages', 1)}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    repository = urls.get("Repository", "https://example.org/the-address-is-set-at-publication")
    docs = Path(config["docs_dir"])

    def outside(link: re.Match[str]) -> str:
        path = (docs / page.file.src_uri).parent.joinpath(link["target"]).resolve()
        if (
            docs in path.parents
            and docs / "dev" not in (path, *path.parents)
            and path.suffix in (".md", ".png", ".svg")
        ):
            return link.group()
        kind = "tree" if path.is_dir() else "blob"
        return f"{link['before']}{repository}/{kind}/main/{path.relative_to(ROOT)}{link['anchor'] or ''})"

    return LINK.sub(outside, markdown)


def first_screen() -> str:
    """The front page before its first section, as a page of the site."""
    screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]

    def from_docs(link: re.Match[str]) -> str:
        target = link["target"]
        inside = target.removeprefix("docs/")
        return f"{link['before']}{inside if inside != target else f'../{target}'}{link['anchor'] or ''})"

    screen = LINK.sub(from_docs, screen)
    return re.sub(r"\]\(#", "](../README.md#", screen)
