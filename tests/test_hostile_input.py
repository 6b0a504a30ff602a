"""Input that a foreign run might hold: nothing shown acts, and nothing is written through a link. Foreign texts in the page and
in the terminal are in ``view/test_page.py`` and ``view/test_browser.py``."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grail_advantage.dump import DumpHeader, write_step
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.page import write_report
from grail_advantage.view.run import open_run
from tests.dumps import dump_row, table_of

PIECES = [
    "\u202e",
    "\x00",
    "\x1b[31m",
    "\x1b]0;x\x07",
    "\ud800",
    "\u2028",
    "\x85",
    "\u200d",
    "日",
    "\n",
    " ",
    "\r",
    "\x9b31m",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts | st.text(st.characters(), max_size=20))
@example(text="</script>" + "".join(PIECES))
def test_visible_text_acts_no_more(text: str) -> None:
    found = visible(text, breaks=False)
    found.encode()
    for character in found:
        assert character == "\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), found
    assert visible(found, breaks=False) == found


def test_links_and_pipes_in_a_foreign_folder(tmp_path: Path) -> None:
    """Nothing is written through a link, and what is no plain file, which may have no end, is not read."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    path = write_step(run / "tokens", DumpHeader(step=3, method="grail"), table_of([dump_row([1.0, 2.0])]))
    content = path.read_bytes()
    for link in (run / "report.html", path):
        link.unlink(missing_ok=True)
        link.symlink_to(precious)
    write_step(run / "tokens", DumpHeader(step=3, method="grail"), table_of([dump_row([1.0, 2.0])]))
    write_report(run)
    assert precious.read_text() == "precious" and path.read_bytes() == content
    assert not (run / "report.html").is_symlink()
    os.mkfifo(run / "metrics.jsonl")
    opened = open_run(run)
    assert opened.metrics == {} and opened.dump.steps == [3] and len(list(opened.dump)) == 1
