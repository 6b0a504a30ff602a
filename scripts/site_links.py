"""A hook of mkdocs: links from the pages to files outside the site go to the repository.

Its address is the entry ``Repository`` of ``project.urls`` in ``pyproject.toml``, which is set at publication.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave the site to the repository."""
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
