"""A row of tokens in a notebook: the right colours, the values by token, and nothing but text in it."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from grail_advantage.report import colours
from grail_advantage.report.notebook import row_html, token_html
from grail_advantage.report.visible import visible
from tests.dumps import HOSTILE, dump_row


class _Reader(HTMLParser):
    """Elements with their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        tag, attrs, text = self.found[-1]
        self.found[-1] = (tag, attrs, text + data)


def _tokens(shown: str) -> list[tuple[str | None, str | None, str]]:
    """Ground, title and text of each token."""
    elements = _Reader(shown).found
    return [
        ((attrs.get("style") or "").removeprefix("background:") or None, attrs["title"], text)
        for tag, attrs, text in elements
        if tag == "span" and "title" in attrs
    ]


def test_tokens_stand_on_the_colours_of_their_weights() -> None:
    table = colours.diverging()
    shown = token_html(["a", " b", "c", "d"], [0.25, 1.0, 9.0, float("nan")])
    assert _tokens(shown) == [
        (table[0], "weight 0.25", "a"),
        (table[32], "weight 1", " b"),
        (table[-1], "weight 9", "c"),
        (None, "no weight", "d"),
    ]
    assert shown._repr_html_() == shown
    legend = [text for tag, attrs, text in _Reader(shown).found if tag == "span" and "title" not in attrs]
    assert legend == ["at most 0.25", "0.5", "1", "2", "at least 4"]


def test_other_scales() -> None:
    signed = [ground for ground, *_ in _tokens(token_html(["a", "b", "c"], [-2.0, 0.0, 1.0], scale="signed"))]
    assert signed == [colours.diverging()[i] for i in (0, 32, 48)]
    plain = [
        ground for ground, *_ in _tokens(token_html(["a", "b"], np.array([0.0, 3.0]), scale="from zero", dark=True))
    ]
    assert plain == [colours.sequential(theme=colours.DARK)[i] for i in (0, -1)]
    assert "entropy 3" in token_html(["a"], [3.0], scale="from zero", name="entropy")
    token_html([], [])
    token_html(["a"], [0.0], scale="signed")


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(1,\) for 2 tokens"):
        token_html(["a", "b"], [1.0])
    with pytest.raises(ValueError, match="scale='log' is unknown; choose weight, signed or from zero"):
        token_html(["a"], [1.0], scale="log")
    with pytest.raises(
        ValueError, match="column='entropy' is not in this row; it has weight, score, advantage, base_advantage"
    ):
        row_html(dump_row([1.0], entropy_T=None), "entropy")
    with pytest.raises(ValueError, match="column='span' is not"):
        row_html(dump_row([1.0]), "span")
    with pytest.raises(ValueError, match="column='surprisal' is not"):
        row_html(dump_row([1.0]), "surprisal")


def test_a_row_by_its_columns() -> None:
    row = dump_row([0.5, 2.0], tokens=["a", "b"], mask_T=[True, False], old_log_prob_T=np.float32([-1.5, -2.0]))
    assert [title for _, title, _ in _tokens(row_html(row))] == ["weight 0.5", "no weight"]
    assert [title for _, title, _ in _tokens(row_html(row, "surprisal"))] == ["surprisal 1.5", "no surprisal"]
    assert next(title for _, title, _ in _tokens(row_html(row, "base_advantage"))) == "base advantage 0.5"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_text(text: str) -> None:
    shown = token_html([text, "b"], [1.0, 2.0], name=text)
    shown.encode()
    elements = _Reader(shown).found
    assert {tag for tag, *_ in elements} == {"div", "span"}
    assert {name for _, attrs, _ in elements for name in attrs} == {"style", "title"}
    (_, _, first), _ = _tokens(shown)
    assert first == visible(text)
