"""The sample report that the pages link, made with fewer problems."""

from __future__ import annotations

import runpy
from pathlib import Path

sample_report = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "sample_report.py"))


def test_the_sample_is_made_and_small(tmp_path: Path) -> None:
    page = tmp_path / "sample.html"
    sample_report["main"](["--problems", "2", "--output", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "worked arithmetic</title>" in text and str(tmp_path) not in text
    shipped = sample_report["OUTPUT"].read_text(encoding="utf-8")
    assert len(text) < len(shipped) < 1_000_000 and shipped.count("</title>") == 1
