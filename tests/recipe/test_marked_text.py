"""Passages between markers."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.marked_text import marked, write_marked

PAGE = "before\n<!-- a -->\nold\n\nlines\n<!-- /a -->\nafter\n<!-- b -->\n<!-- /b -->\n"


def test_only_the_marked_passage_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert marked(PAGE, "a") == "old\n\nlines"
    write_marked(page, "a", "\nnew\n")
    write_marked(page, "b", "b's")
    assert page.read_text() == "before\n<!-- a -->\nnew\n<!-- /a -->\nafter\n<!-- b -->\nb's\n<!-- /b -->\n"
    write_marked(page, "a", "newer")
    assert marked(page.read_text(), "a") == "newer"
    for text in ("<!-- a -->", "<!-- /a --> <!-- a -->", "<!-- a --><!-- a --><!-- /a -->"):
        page.write_text(text)
        with pytest.raises(ValueError, match="<!-- a --> and <!-- /a -->"):
            write_marked(page, "a", "x")
        assert page.read_text() == text
