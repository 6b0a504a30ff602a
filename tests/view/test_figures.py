"""Figures for papers: what is drawn is what the dump and the page hold."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from grail_advantage.dump import (
    DumpHeader,
    DumpRow,
    read_dump,
    received_table,
    write_received,
    write_step,
)
from grail_advantage.report import main
from grail_advantage.view.figures import draw, write_figure
from grail_advantage.view.lines import kept, wrap
from grail_advantage.view.page import by_position, colours, data
from tests.dumps import HOSTILE, dump_row, method_columns, table_of
from tests.view.synthetic import write_dump
from tests.view.test_received import KEYS, LENGTHS, SCALED, header, receipt

KINDS = ("response", "methods", "positions", "received")
METHODS = ("grail", "surprisal", "oar_g")


@pytest.fixture
def run(tmp_path: Path) -> data.Run:
    """Two steps under three methods."""
    write_dump(tmp_path / "tokens", steps=(1, 5), methods=METHODS)
    return data.open_run(tmp_path)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Three responses with base advantages 0.5, -2 and 0, and a receipt with a finding."""
    rows = [
        dump_row(np.arange(1.0, length + 1), step=3, row=place, key=key, base_advantage_T=[base] * length,
                 advantage_T=base * np.arange(1.0, length + 1), mask_T=[True] * (length - 1) + [place == 1])
        for place, (key, length, base) in enumerate(zip(KEYS, LENGTHS, (0.5, -2.0, 0.0), strict=True))
    ]  # fmt: skip
    write_step(tmp_path, DumpHeader(step=3, method="grail"), table_of(rows))
    write_received(tmp_path, header(3, 0, SCALED), received_table(receipt(), KEYS, LENGTHS))
    return tmp_path


def drawn(figure: Figure) -> dict[str, np.ndarray]:
    """The values of each strip, in order; NaN where there is no colour."""
    strips = [one for one in figure.axes[0].collections if one.get_array() is not None]
    return {str(strip.get_label()): np.ma.filled(strip.get_array().astype(float), np.nan) for strip in strips}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def one(folder: Path, *rows: DumpRow, **values: object) -> data.Run:
    write_step(folder, DumpHeader(step=1, method="grail", special_tokens={7: "<|end|>"}), table_of(rows))
    return data.open_run(folder)


# ------------------------------------------------------------------------------------------------------------------- tokens


def test_the_weights_of_every_method_are_drawn(run: data.Run) -> None:
    row = next(row for row in read_dump(run.folder / "tokens").rows([5]) if row.row == 2)
    figure = draw(run, "methods", width=20, row=2)
    strips = drawn(figure)
    assert list(strips) == list(METHODS) == [text for text in texts(figure) if text in METHODS][:3]
    for name, values_T in strips.items():
        np.testing.assert_array_equal(values_T, row.methods[name].weight_T.astype(float))
    (alone,) = drawn(draw(run, "response", width=20, row=2)).items()
    assert alone[0] == "grail" and np.array_equal(alone[1], row.weight_T.astype(float))


def test_colours_and_legend_are_the_pages(tmp_path: Path) -> None:
    weights = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 9.0, 0.0]
    figure = draw(one(tmp_path, dump_row(weights, mask_T=[True] * 7 + [False])), "response", width=6)
    (strip,) = [one for one in figure.axes[0].collections if one.get_label() == "grail"]
    strip.update_scalarmappable()
    shown = [tuple(round(255 * part) for part in colour[:3]) for colour in strip.get_facecolor()[:-1]]
    table = colours.diverging()
    for place, (colour, weight) in enumerate(zip(shown, weights, strict=False)):
        near = round((float(colours.weight_place(weight)) + 1) / 2 * 64)
        wanted = [tuple(bytes.fromhex(name[1:])) for name in table[max(0, near - 1) : near + 2]]
        assert colour in wanted, place
    assert shown[3] == tuple(bytes.fromhex(table[32][1:])), "a weight of 1 is the ground"
    assert strip.get_facecolor()[-1][3] == 0, "what does not train has no colour"
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["≤¼", "½", "1", "2", "≥4"]


def test_a_method_that_gives_advantages_makes_all_of_them_advantages(tmp_path: Path) -> None:
    methods = {
        "turn_rloo": method_columns(score_T=None, weight_T=np.ones(3), advantage_T=np.array([0.5, -2.0, 3.0])),
        "grail": method_columns(score_T=None, weight_T=np.array([2.0, 1.0, 5.0])),
    }
    figure = draw(one(tmp_path, dump_row([1.0] * 3, methods=methods)), "methods", width=6)
    assert {name: values.tolist() for name, values in drawn(figure).items()} == {
        "turn_rloo": [0.5, -2.0, 3.0],
        "grail": [1.0, 0.5, 2.5],
    }
    assert "token advantage" in texts(figure)


def test_what_arrived_is_a_multiple_of_the_base_advantage(trained: Path) -> None:
    run = data.open_run(trained)
    first, second, third = (drawn(draw(run, "methods", width=6, row=row)) for row in range(3))
    np.testing.assert_allclose(first["received (grail)"], [0.75, -1.0, 4.0])
    np.testing.assert_allclose(second["received (grail)"], [-0.5, -1.0, -1.5, -2.0])
    assert np.isnan(third["received (grail)"]).all()
    np.testing.assert_array_equal(first["grail"], [1.0, 2.0, np.nan])
    figure = draw(run, "methods", width=6, row=0)
    (clipped,) = [one for one in figure.axes[0].collections if one.get_label() == "clipped"]
    assert (
        len(clipped.get_paths()) == 1
        and clipped.get_paths()[0].vertices[0, 0] > figure.axes[0].texts[0].get_position()[0]
    )
    assert "received (grail)" not in drawn(draw(run, "response", width=6, row=0))


def test_answer_and_incorrect_step_are_marked(tmp_path: Path) -> None:
    tokens = ["So ", "2+2", "=", "5", ". ", "\\boxed{", "5", "}"]
    values = {"tokens": tokens, "span": (5, 6, 7, 8), "outcome": "wrong"}
    labelled = one(tmp_path / "a", dump_row([1.0] * 8, labels={"wrong_step": [1, 4]}, **values))
    plain = one(tmp_path / "b", dump_row([1.0] * 8, **values))
    cell = 8 * 0.602
    for figure in (draw(labelled, "methods", width=6), draw(plain, "methods", width=6, mark=(3, 8))):
        ends = {}
        for name in ("answer", "incorrect step"):
            (mark,) = [one for one in figure.axes[0].collections if one.get_label() == name]
            x = (
                np.concatenate([path.vertices[:, 0] for path in mark.get_paths()])
                - figure.axes[0].texts[0].get_position()[0]
            )
            ends[name] = (round(x.min() / cell), round(x.max() / cell))
        assert ends == {"answer": (10, 19), "incorrect step": (3, 8)}
    assert "incorrect step" not in texts(draw(plain, "methods", width=6))


def test_lines_break_at_spaces_and_keep_tokens_apart() -> None:
    def shown(texts: list[str], columns: int) -> list[list[tuple[int, int, int, str]]]:
        return [[tuple(piece) for piece in line] for line in wrap(texts, columns)]

    assert shown(["one", " two", " three"], 9) == [
        [(0, 0, 3, "one"), (1, 3, 7, " two"), (2, 7, 8, " ")],
        [(2, 0, 5, "three")],
    ]
    assert shown(["abc", "def", "gh"], 7) == [[(0, 0, 3, "abc"), (1, 3, 6, "def")], [(2, 0, 2, "gh")]]
    assert shown(["abcdefgh"], 3) == [[(0, 0, 3, "abc")], [(0, 0, 3, "def")], [(0, 0, 2, "gh")]]
    assert shown(["a↵\n↵\n", "b"], 9) == [[(0, 0, 2, "a↵")], [(0, 0, 1, "↵")], [(1, 0, 1, "b")]]
    assert shown(["日", "e\u0301", "x"], 9) == [[(0, 0, 2, "日"), (1, 2, 3, "e\u0301"), (2, 3, 4, "x")]]
    for columns in range(1, 12):
        text = ["The ", "answer", " is", "  ", "\\boxed", "{", "1", "2", "}", "."]
        lines = wrap(text, columns)
        assert "".join(piece.text for line in lines for piece in line) == "".join(text)
        assert all(line[-1].end <= columns + line[-1].text.endswith(" ") for line in lines)


def test_a_long_response_loses_its_middle_but_not_the_incorrect_step(tmp_path: Path) -> None:
    lines = wrap([f"line {number}\n" for number in range(100)], 20)
    assert kept(lines, 200, range(0)) == list(range(100))
    assert kept(lines, 9, range(50, 60)) == [0, 1, 2, 50, 51, 52, 97, 98, 99]
    assert kept(lines, 9, range(98, 99)) == [0, 1, 2, 97, 98, 99] and len(kept(lines, 9, range(0))) <= 9
    tokens = [f"word{number}\n" for number in range(900)]
    run = one(tmp_path, dump_row([1.0] * 900, tokens=tokens, labels={"wrong_step": [450, 455]}))
    figure = draw(run, "response", width=6)
    words = texts(figure)
    (hidden, more) = [int(text.split()[1]) for text in words if text.startswith("…")]
    assert hidden + more + sum(text.startswith("word") for text in words) == 900 and "word452↵" in words
    assert figure.get_figheight() * 72 < 720


def test_parts_of_characters_special_tokens_and_hostile_texts(tmp_path: Path) -> None:
    tokens = ["", "", "日", "", *HOSTILE[:-1]]
    row = dump_row([1.0] * len(tokens), tokens=tokens, token_ids_T=[1, 2, 3, 7, *range(8, 4 + len(tokens))])
    run = one(tmp_path, row)
    figure = draw(run, "response", width=6)
    assert texts(figure)[:4] == ["◌", "◌", "日", "<|end|>"]
    assert not any(set(text) & {"\u202e", "\x1b", "\x00"} for text in texts(figure))
    for suffix in (".svg", ".pdf"):
        assert "日" in write_figure(run, "response", tmp_path / f"a{suffix}", width=6)
    elements = list(ElementTree.parse(tmp_path / "a.svg").iter())  # comments are none
    assert not {element.tag.split("}")[1] for element in elements} & {"script", "img", "a"}
    assert not any(name.startswith("on") for element in elements for name in element.attrib)
    assert any("$x^2$" in (element.text or "") for element in elements)


# -------------------------------------------------------------------------------------------------------------------- plots


def test_means_by_place_are_the_pages(run: data.Run) -> None:
    rows = [row for row in run.dump if row.methods] if run.dump else []
    figure = draw(run, "positions", width=6)
    assert [axes.get_title("left") for axes in figure.axes] == list(METHODS)
    for axes in figure.axes:
        name = axes.get_title("left")
        lines = [line for line in axes.get_lines() if line.get_label()[0] != "_"]
        assert len(lines) == 2
        for line, outcome, word in zip(lines, ("right", "wrong"), ("correct", "incorrect"), strict=True):
            own = [row for row in rows if row.outcome == outcome and row.methods[name].no_scores is None]
            inside = [row.mask_T & (np.arange(len(row)) < (row.span.start if row.span else len(row))) for row in own]
            means = [
                by_position.binned(row.methods[name].weight_T[mask]) for row, mask in zip(own, inside, strict=True)
            ]
            np.testing.assert_allclose(line.get_ydata(), np.nanmean(means, axis=0))
            assert line.get_label() == f"{word} ({len(own)})"


def test_intended_against_received(trained: Path) -> None:
    figure = draw(data.open_run(trained), "received", width=3.25)
    (axes,) = figure.axes
    points = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()[1:]}
    assert points == {
        "never clipped (6)": [[0.5, 0.375], [1.5, 2.0], [-2.0, 1.0], [-4.0, 2.0], [-6.0, 3.0], [-8.0, 4.0]],
        "clipped at least once (1)": [[1.0, -0.5]],
    }
    said = " ".join(figure.texts[0].get_text().split())
    assert "1 thing in what arrived does not fit the loss (vanilla)" in said
    assert "scaled: every token received 0.5 times what it should" in said
    first = draw(data.open_run(trained), "received", width=3.25, row=0).axes[0]
    assert sum(len(line.get_xdata()) for line in first.get_lines()[1:]) == 3


# -------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
def test_every_figure_is_an_svg_a_pdf_and_a_png(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    for kind in KINDS:
        for suffix, start in starts.items():
            paths = [tmp_path / f"{kind}{number}{suffix}" for number in (1, 2)]
            for path in paths:
                assert main([str(trained), "--figure", kind, "--row", "1", "--out", str(path), "--width", "4"]) == 0
            first, second = (path.read_bytes() for path in paths)
            assert first.startswith(start) and first == second
            if suffix == ".svg":
                assert b"<text" in first and b'width="288pt"' in first
            elif suffix == ".pdf":
                assert b"/FontFile2" in first and b"/Type3" not in first
    assert main([str(trained), "--figure", "response"]) == 0 and (trained / "response.pdf").exists()
    assert capsys.readouterr().out.splitlines()[-1] == str(trained / "response.pdf")


def test_characters_without_a_glyph_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ord("日") not in get_font(findfont("DejaVu Sans Mono")).get_charmap()
    one(tmp_path, dump_row([1.0], tokens=["日"]))
    for name, message in (("a.png", "report: no font has 日"), ("a.svg", "")):
        assert main([str(tmp_path), "--figure", "response", "--output", str(tmp_path / name)]) == 0
        assert capsys.readouterr().err.startswith(message)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["response", "--output", "a.jpg"], "--output a.jpg: the name of a figure's file ends in .svg, .pdf, .png"),
        (["response", "--width", "0.5"], "--width 0.5 must be from 2"),
        (["methods", "--width", "2", "--row", "0"], "--width 2 leaves 1"),
        (["response", "--row", "9"], "--row 9 is not in step 3"),
        (["response", "--step", "4"], "--step 4 is not in"),
        (["response", "--mark", "1:2"], "--mark 1:2 has no token's first character; the response has 9 characters"),
        (["response", "--mark", "0:99"], "--mark 0:99 has no token's first"),
        (
            ["received", "--step", "4"],
            "a training with algorithm.token_dump.received=true (in TRL its token_dump) does",
        ),
    ],
)
def test_errors_name_option_and_remedy(
    trained: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained), "--figure", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_run_that_has_not_what_a_figure_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one(tmp_path / "a", dump_row([1.0, 1.0], no_scores="no answer"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    for folder, kind, message in (
        ("a", "received", "token_dump.received=true"),
        ("a", "positions", "no method gave the responses weights"),
        ("b", "methods", "algorithm.token_dump.folder"),
    ):
        assert main([str(tmp_path / folder), "--figure", kind]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--figure", "methods", "--mark", "3"])
    assert "'3' must be START:END" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    run: data.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "grail_advantage.view.figures")
    assert main([str(run.folder), "--figure", "methods"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'grail-advantage[figures]'" in line
