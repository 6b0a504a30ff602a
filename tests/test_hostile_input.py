"""Input that a model or a foreign run might hold: nothing is raised but what is said, and nothing shown acts."""

from __future__ import annotations

import io
import json
import os
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from grail_advantage.dump import COLUMNS, DumpHeader, DumpRow, write_step
from grail_advantage.receipt.foreign import visible
from grail_advantage.view import terminal
from grail_advantage.view.page import render, write_report
from grail_advantage.view.run import find_response, open_run
from tests.dumps import changed, dump_row, method_columns, table_of

few = settings(max_examples=60, deadline=None, derandomize=True)

PIECES = [
    "\\boxed{", "{", "}", "\\frac", "1", "-2", ".5", "e9", "\\%", ",", "</script><script>alert(1)</script>", "<!--", "&amp;",
    "\u202e", "\x00", "\x1b[31m", "\x1b]0;x\x07", "\ud800", "\u2028", "ß", "日", "\\text{ cm}", "\\,", "$", "\n", " ", "\r",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)
EVIL = "</script><script>alert(1)</script>\u202e\x00\x1b[31m\x1b]0;x\x07<!--\ud800"
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), True, None])
values = st.recursive(
    numbers | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def _jsonl(rows: list, broken: bytes = b"") -> bytes:
    return b"\n".join([*(json.dumps(row).encode() for row in rows), broken])


def _row(text: str) -> DumpRow:
    """A row that has this text wherever a row has one."""
    one_T = np.ones(2, dtype=np.float32)
    words = dict.fromkeys(("key", "id", "prompt", "response", "ground_truth", "outcome", "answer", "no_scores"), text)
    columns = {f"{name}_T": one_T for name in COLUMNS}
    ids = np.array([3, 4])
    methods = {text: method_columns(score_T=None, weight_T=one_T, no_scores=text)}
    row = dump_row(one_T, step=7, prompt_ids=ids, token_ids_T=ids, tokens=[text, ""], mask_T=ids > 3, **words)
    return changed(row, methods=methods, labels={"wrong_step": [0, 1]}, reward=None, **columns)


@few
@given(words=texts, records=st.lists(st.fixed_dictionaries({"step": numbers, "data": st.dictionaries(texts, values)})))
@example(words=EVIL, records=[{"step": 1, "data": {EVIL: 1.0}}])
@example(words="a", records=[{"step": 1, "data": {"a": 10**400, "b": None, "c": True}}, {"step": 1e3, "data": {}}])
def test_a_foreign_run_is_data_in_the_page_and_plain_text_in_a_terminal(words: str, records: list) -> None:
    words = words.encode("utf-8", "replace").decode()  # a file holds no lone surrogate
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run <b>&amp;"
        header = DumpHeader(step=7, method=words, model=words, options={words: words}, special_tokens={4: words})
        write_step(run / "tokens", header, table_of([_row(words)]))
        (run / "metrics.jsonl").write_bytes(_jsonl(records, b'{"step":1,"data^@^@'))
        opened = open_run(run)
        render([opened]).encode()
        written = io.StringIO()
        try:
            terminal.print_rollout(*find_response(opened, None, None), Console(file=written, width=60))
        except ValueError:
            assert not list(opened.dump)
        _check_terminal(written.getvalue())


def _check_terminal(text: str) -> None:
    text.encode()
    for character in text:
        assert character in "\n\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), repr(
            text
        )


@few
@given(text=texts | st.text(st.characters(), max_size=20))
@example(text=EVIL)
def test_visible_text_acts_no_more(text: str) -> None:
    found = visible(text, breaks=False)
    _check_terminal(found)
    assert "\n" not in found and visible(found, breaks=False) == found


def test_links_and_pipes_in_a_foreign_folder(tmp_path: Path) -> None:
    """Nothing is written through a link, and what is no plain file, which may have no end, is not read."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")

    def written() -> Path:
        return write_step(run / "tokens", DumpHeader(step=3, method="grail"), table_of([_row("a")]))

    written()
    report = run / "report.html"
    report.symlink_to(precious)
    write_report(run)
    written()
    assert precious.read_text() == "precious" and not report.is_symlink() and report.stat().st_size > 10_000
    os.mkfifo(run / "metrics.jsonl")
    opened = open_run(run)
    assert opened.metrics == {} and opened.dump.steps == [3] and len(list(opened.dump)) == 1
