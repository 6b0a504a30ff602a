"""A rollout in the terminal: the right row, the right colours, and nothing in it acts on the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from grail_advantage.report import colours
from grail_advantage.report.__main__ import main
from grail_advantage.report.terminal import coloured_tokens, find_row, print_rollout, rollout_view
from grail_advantage.report.visible import visible
from grail_advantage.token_dump import DumpHeader, DumpRow, read_dump, write_step
from tests.dumps import HOSTILE, dump_row

HEADER = DumpHeader(step=1, method="grail", special_tokens={7: "<|im_end|>"})


def _printed(row: DumpRow, *, colour: bool = False, header: DumpHeader | None = HEADER) -> str:
    console = Console(width=100, force_terminal=colour, color_system="truecolor" if colour else None, highlight=False)
    with console.capture() as captured:
        console.print(rollout_view(header, row))
    return captured.get()


class TestChoice:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for step in (1, 5):
            rows = [dump_row([1.0], step=step, row=row, neutral="no answer" if row < 3 else None) for row in (2, 3, 4)]
            write_step(tmp_path, DumpHeader(step=step, method="grail"), rows)
        write_step(tmp_path, DumpHeader(step=9, method="grail"), [])
        return tmp_path

    def _find(self, folder: Path, **which: int) -> tuple[int, int]:
        header, row = find_row(read_dump(folder), **which)
        assert header.step == row.step
        return row.step, row.row

    def test_by_default_the_last_step_and_a_row_with_scores(self, folder: Path) -> None:
        assert self._find(folder) == (5, 3)
        assert self._find(folder, step=1) == (1, 3)
        assert self._find(folder, step=1, row=4) == (1, 4)
        assert self._find(folder, row=2) == (5, 2)

    def test_a_step_without_scores(self, tmp_path: Path) -> None:
        write_step(tmp_path, HEADER, [dump_row([1.0], row=row, neutral="no answer") for row in (6, 7)])
        assert self._find(tmp_path) == (1, 6)

    def test_what_is_not_there_is_said_with_what_is(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--step 2 is not in .*; its steps are 1, 5, 9"):
            find_row(read_dump(folder), step=2)
        with pytest.raises(ValueError, match=r"--row 9 is not in step 5 of .*; its rows are 2, 3, 4"):
            find_row(read_dump(folder), step=5, row=9)
        with pytest.raises(ValueError, match=r"holds no rows that can be read"):
            find_row(read_dump(folder), step=9)
        with pytest.raises(ValueError, match=r"its steps are none"):
            find_row(read_dump(tmp_path / "nowhere"), step=1)


class TestView:
    def test_says_what_is_known(self) -> None:
        row = dump_row([0.5, 2.0, 1.0], tokens=["so ", "5", ""], token_ids_T=[1, 2, 7], gold="4", answer="5", span=(1, 1, 2, 2),
                       outcome="wrong", reward=0.0, truncated=True, score_T=[0.25, 8.0, np.nan])  # fmt: skip
        said = _printed(row)
        first = said.splitlines()[0]
        for fact in ("step 1, row 0", "grail", "wrong", "reward 0", "gold 4", "answer 5", "truncated", "3 tokens"):
            assert fact in first + said.splitlines()[1], fact
        assert "What is it?" in said and "so 5<|im_end|>" in said
        heaviest = next(line for line in said.splitlines() if "heaviest " in line and "2.000" in line)
        assert re.search(r"5\W+1\W+2\.000\W+8\b", heaviest)
        assert any("lightest" in line and "0.500" in line and "0.25" in line for line in said.splitlines())

    def test_a_row_without_scores_and_without_what_a_dump_may_lack(self) -> None:
        row = dump_row([1.0, 1.0], score_T=None, neutral="no answer", outcome=None, reward=None, prompt="")
        said = _printed(row, header=None)
        assert "not scored: no answer" in said and "every token weighs the same" in said

    def test_tokens_stand_on_the_colours_of_their_weights(self) -> None:
        table = colours.diverging(theme=colours.DARK)
        places = np.array([-1.0, 0.0, np.nan, 1.0])
        shown = coloured_tokens(["a", "b", "c", ""], places, table, "#ffffff", special={3: "<end>"}, bold=range(1, 2))
        assert shown.plain == "abc<end>"
        grounds = [span.style.bgcolor.get_truecolor().hex if span.style.bgcolor else None for span in shown.spans]
        assert grounds == [table[0], table[32], None, table[-1]]
        assert [bool(span.style.bold) for span in shown.spans] == [False, True, False, False]

    def test_tokens_that_do_not_train_have_no_colour(self) -> None:
        row = dump_row([4.0, 4.0], tokens=["heavy", "tool"], mask_T=[True, False])
        said = _printed(row, colour=True)
        end = colours.diverging(theme=colours.DARK)[-1]
        red, green, blue = (int(end[i : i + 2], 16) for i in (1, 3, 5))
        assert re.search(rf"48;2;{red};{green};{blue}m\w*heavy", said)
        assert not re.search(r"48;2;[\d;]+mtool", said)

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    @pytest.mark.parametrize("colour", [True, False])
    def test_hostile_texts_do_nothing(self, text: str, colour: bool) -> None:
        row = dump_row([2.0, 0.5], tokens=[text, " b"], prompt=text, gold=text, answer=text, neutral=text)
        header = DumpHeader(step=1, method=text, special_tokens={0: text})
        said = _printed(row, colour=colour, header=header)
        said.encode()
        rest = re.sub(r"\x1b\[[\d;]*m", "", said)  # rich's own colours
        assert not re.search(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", rest
        )
        assert "[red]markup[/red]" in rest or "markup" not in text


class TestVisible:
    def test_plain_text_stays(self) -> None:
        text = "Über π ≈ 3, 日本語, \\frac{1}{2} and 👨‍👩‍👧"
        assert visible(text) == text

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("a\nb", "a↵\nb"),
            ("\r\t\x00\x1b[0m\x7f", "␍␉␀␛[0m␡"),
            ("\u202eevil", "<U+202E>evil"),
            ("zero\u200bwidth\ufeff\u00ad", "zero<U+200B>width<U+FEFF><U+00AD>"),
            ("\ud800", "<U+D800>"),
            ("\x85\u2028", "<U+0085><U+2028>"),
            ("\U0010ffff\ue000", "<U+10FFFF><U+E000>"),
        ],
    )
    def test_what_hides_is_spelt_out(self, text: str, shown: str) -> None:
        assert visible(text) == shown

    def test_in_one_line(self) -> None:
        assert visible("a\n\nb", breaks=False) == "a↵↵b"


class TestCommand:
    """``python -m grail_advantage.report RUN --terminal``."""

    def test_shows_a_rollout_and_what_could_not_be_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_step(
            tmp_path / "tokens", HEADER, [dump_row([2.0, 0.5], row=row, tokens=["so ", "it"]) for row in (0, 1)]
        )
        path.with_name("step_000002.parquet").write_bytes(b"")
        assert main([str(tmp_path), "--terminal", "--row", "1"]) == 0
        printed = capsys.readouterr()
        assert "step 1, row 1" in printed.out and "so it" in printed.out
        assert "step_000002.parquet: cannot be read as Parquet" in printed.err

    def test_says_what_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_step(tmp_path, HEADER, [dump_row([1.0])])
        assert main([str(tmp_path), "--terminal", "--step", "7"]) == 1
        assert "report: --step 7 is not in" in capsys.readouterr().err
        (tmp_path / "metrics").mkdir()
        (tmp_path / "metrics" / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
        assert main([str(tmp_path / "metrics"), "--terminal"]) == 1
        assert "has no token dump" in capsys.readouterr().err


def test_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(tmp_path, HEADER, [dump_row([2.0, 0.5], tokens=["so ", "it"])])
    print_rollout(read_dump(tmp_path))
    assert "so it" in capsys.readouterr().out
