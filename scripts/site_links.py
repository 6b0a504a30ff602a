"""A hook of mkdocs. The site begins with the first parts of the front page; links that leave the site go to the repository.

The repository's address is the entry ``Repository`` of ``project.urls`` in ``pyproject.toml``, which is set at publication.
Without it these links are plain text.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOME = "README.md"
LINK = re.compile(r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the front page's beginning before the list of pages, and point links that leave the site to the repository."""
    if page.file.src_uri == HOME:
        markdown = f"{front()}\n{markdown.replace('# Pages', '## Pages', 1)}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    docs = Path(config["docs_dir"])

    def outside(link: re.Match[str]) -> str:
        path = (docs / page.file.src_uri).parent.joinpath(link["target"]).resolve()
        if (
            docs in path.parents
            and docs / "dev" not in (path, *path.parents)
            and path.suffix in (".md", ".png", ".svg")
        ):
            return link.group()
        if "Repository" not in urls:
            return link["text"]
        kind = "tree" if path.is_dir() else "blob"
        return f"{link['before']}{urls['Repository']}/{kind}/main/{path.relative_to(ROOT)}{link['anchor'] or ''})"

    return LINK.sub(outside, markdown)


def front() -> str:
    """The first screen of the front page and the section after it, as a page of the site."""
    screen = "\n## ".join((ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[:2])

    def from_docs(link: re.Match[str]) -> str:
        target = link["target"]
        inside = target.removeprefix("docs/")
        return f"{link['before']}{inside if inside != target else f'../{target}'}{link['anchor'] or ''})"

    return LINK.sub(from_docs, screen)
