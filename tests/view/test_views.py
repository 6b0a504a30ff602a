"""Rollouts outside the page: a response in the terminal, a notebook, and hostile text in each."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from grail_advantage.dump import DumpHeader, DumpRow, read_dump, write_step
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.notebook import row_html, token_html
from grail_advantage.view.terminal import find_row, rollout_view
from tests.dumps import HOSTILE, dump_row, table_of

NAN = float("nan")
HEADER = DumpHeader(step=1, method="grail", special_tokens={7: "<|im_end|>"})


def test_characters_that_hide_are_spelt_out() -> None:
    """That no text acts is a property in ``tests/test_hostile_input.py``."""
    assert visible("Über π ≈ 3, 日本語, \\frac{1}{2} and 👨‍👩‍👧") == "Über π ≈ 3, 日本語, \\frac{1}{2} and 👨‍👩‍👧"
    assert visible("\r\t\x00\x1b[0m\u202ea\nb") == "␍␉␀␛[0m<U+202E>a↵\nb" and visible("a\n\nb", breaks=False) == "a↵↵b"


# ----------------------------------------------------------------------------------------------------------------- terminal


def _printed(row: DumpRow, *, colour: bool = False, header: DumpHeader | None = HEADER) -> str:
    console = Console(width=100, force_terminal=colour, color_system="truecolor" if colour else None, highlight=False)
    with console.capture() as captured:
        console.print(rollout_view(header, row))
    return captured.get()


def test_the_chosen_row(tmp_path: Path) -> None:
    for step in (1, 5):
        rows = [dump_row([1.0], step=step, row=row, no_scores="no answer" if row < 3 else None) for row in (2, 3, 4)]
        write_step(tmp_path, DumpHeader(step=step, method="grail"), table_of(rows))
    dump = read_dump(tmp_path)
    for which, wanted in (({}, (5, 3)), ({"step": 1}, (1, 3)), ({"step": 1, "row": 4}, (1, 4)), ({"row": 2}, (5, 2))):
        header, row = find_row(dump, **which)
        assert (row.step, row.row) == wanted and header.step == row.step
    for which in ({"step": 2}, {"step": 5, "row": 9}):
        with pytest.raises(ValueError, match=f"--{list(which)[-1]} "):
            find_row(dump, **which)


def test_a_response_in_the_terminal() -> None:
    row = dump_row([0.5, 2.0, 1.0], tokens=["so ", "5", ""], token_ids_T=[1, 2, 7], ground_truth="4", answer="5",
                   span=(1, 1, 2, 2), outcome="wrong", reward=0.0, truncated=True, score_T=[0.25, 8.0, np.nan])  # fmt: skip
    printed = _printed(row)
    assert "What is it?" in printed and "so 5<|im_end|>" in printed
    assert re.search(r"highest .*5\W+1\W+2\.000\W+8\b", printed) and re.search(r"lowest.*0\.500\W+0\.25", printed)
    bare = dump_row([1.0, 1.0], score_T=None, no_scores="no answer", outcome=None, reward=None, prompt="")
    assert "no scores: no answer" in _printed(bare, header=None)


def test_a_conversation_in_the_terminal_and_a_notebook() -> None:
    """By its advantages, with rewards and advantages of its turns, and no word of weights."""
    row = dump_row([1.0] * 4, tokens=["call", "\nError executing tool 'f': x", "so ", "5"], mask_T=[True, False, True, True],
                   advantage_T=[-0.5, 0, 2, 2], reward=3.0, outcome="wrong", answer="5", ground_truth="5",
                   labels={"tool": [[1, 2]], "turn_rewards": [0.0, 3.0]})  # fmt: skip
    printed = " ".join(_printed(row).split())
    for wanted in (
        "acc not above 0 | reward 3",
        "rewards by turn 0, 3",
        "advantages by turn -0.5, 2",
        "failed calls: 1",
    ):
        assert wanted in printed
    assert (
        re.search(r"highest .*so\W+2\W+2\.000", printed) and "weight" not in printed and "advantage -2 0 2" in printed
    )
    titles = [title for title, _ in _tokens(row_html(row))]
    assert titles == ["advantage -0.5", "no advantage", "advantage 2", "advantage 2"]


# ----------------------------------------------------------------------------------------------------------------- notebook


class _Reader(HTMLParser):
    """Elements with their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        tag, attrs, text = self.elements[-1]
        self.elements[-1] = (tag, attrs, text + data)


def _tokens(shown: str) -> list[tuple[str | None, str]]:
    """Title and text of each token."""
    return [
        (attrs["title"], text) for tag, attrs, text in _Reader(shown).elements if tag == "span" and "title" in attrs
    ]


def test_tokens_in_a_notebook() -> None:
    shown = token_html(["a", " b", "c", "d"], [0.25, 1.0, 9.0, NAN])
    assert shown._repr_html_() == shown
    assert _tokens(shown) == [("weight 0.25", "a"), ("weight 1", " b"), ("weight 9", "c"), ("no weight", "d")]
    assert not _tokens(token_html([], [])) and _tokens(token_html(["a"], [0.0], scale="signed"))
    row = dump_row([0.5, 2.0], tokens=["a", "b"], mask_T=[True, False])
    assert [title for title, _ in _tokens(row_html(row))] == ["weight 0.5", "no weight"]
    with pytest.raises(ValueError, match=r"values has shape \(1,\) for 2 tokens"):
        token_html(["a", "b"], [1.0])


# ------------------------------------------------------------------------------------------------------------- hostile text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_do_nothing(text: str) -> None:
    """In the terminal with and without colours, and in a notebook."""
    row = dump_row([2.0, 0.5], tokens=[text, " b"], prompt=text, ground_truth=text, answer=text, no_scores=text)
    header = DumpHeader(step=1, method=text, special_tokens={0: text})
    for colour in (True, False):
        rest = re.sub(r"\x1b\[[\d;]*m", "", _printed(row, colour=colour, header=header))  # rich's own colours
        rest.encode()
        acting = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
        assert not re.search(acting, rest) and ("[red]markup[/red]" in rest or "markup" not in text)
    shown = token_html([text, "b"], [1.0, 2.0], name=text)
    elements = _Reader(shown).elements
    assert {tag for tag, *_ in elements} == {"div", "span"} and shown.encode()
    assert {name for _, attrs, _ in elements for name in attrs} == {"style", "title"}
    assert _tokens(shown)[0][1] == visible(text)
