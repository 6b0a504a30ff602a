"""A hook of mkdocs. The site begins with the first parts of the front page; links that leave the site go to the
repository (``project.urls.Repository`` of ``pyproject.toml``, set at publication), or are plain text."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[([^\]]*)\]\()([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the front page's beginning before the list of pages, docstrings below the names of the API, and point links
    that leave the site to the repository."""
    docs = Path(config["docs_dir"])
    if page.file.src_uri == "README.md":
        screen = "\n## ".join((ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[:2])
        front = LINK.sub(
            lambda link: f"{link[1]}{os.path.relpath(link[3], 'docs')}{link[4] or ''})", screen
        )
        markdown = f"{front}\n{markdown.replace('# Pages', '## Pages', 1)}"
    if page.file.src_uri == "api.md":
        names = re.findall(r"`(grail_advantage\.[\w.]+)`(?=[^|\n]*\|)", markdown)
        markdown += "\n## Signatures\n\n" + "\n\n".join(f"::: {name}" for name in names)
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].get(
        "Repository"
    )

    def outside(link: re.Match[str]) -> str:
        path = (docs / page.file.src_uri).parent.joinpath(link[3]).resolve()
        if docs in path.parents and path.suffix in (".md", ".png", ".svg"):
            return link[0]
        if not repository:
            return link[2]
        kind = "tree" if path.is_dir() else "blob"
        return f"{link[1]}{repository}/{kind}/main/{path.relative_to(ROOT)}{link[4] or ''})"

    return LINK.sub(outside, markdown)
