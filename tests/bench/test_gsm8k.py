"""GSM8K solutions with one changed result, by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from bench.gsm8k import CannotEditError, Edit, edit, evaluate, label_of

QUESTION = "Ann has 48 clips and sells half as many more. How many does she sell at 3 dollars?"
SOLUTION = (
    "She sells 48/2=<<48/2=24>>24 clips.\nSo 24+48=<<24+48=72>>72 in all.\nThat is 72*3=<<72*3=216>>216.\n#### 216"
)


def test_a_changed_result_is_carried_on() -> None:
    seen = set()
    for seed in range(12):
        changed = edit(QUESTION, SOLUTION, str(seed))
        assert changed.original_lines[1] == "So 24+48=72 in all." and changed.original_answer == "216"
        assert changed.lines[: changed.line] == changed.original_lines[: changed.line]
        numbers = [line.split("=")[1].split()[0].rstrip(".") for line in changed.lines]
        # Each line after the changed one follows from the one before.
        for place in range(changed.line + 1, 3):
            left = changed.lines[place].split("=")[0].split()[-1]
            assert evaluate(left) == int(numbers[place]) and numbers[place - 1] in left
        assert changed.answer == numbers[2] != "216"
        seen.add(changed.line)
    assert seen == {1, 2}, "24 is a common number, and is left alone"


@pytest.mark.parametrize(
    "solution", ["no answer", "One line 1+1=<<1+1=2>>2\n#### 2", SOLUTION.replace("=24>>24", "=25>>25")]
)
def test_what_is_not_certain_is_left_out(solution: str) -> None:
    with pytest.raises(CannotEditError):
        edit(QUESTION, solution, "0")


def test_expressions() -> None:
    assert evaluate("1,000*(2+.5)/-4") == Fraction(-625)
    for text in ("2**3", "x", "1/0", "", "9" * 300):
        with pytest.raises(CannotEditError):
            evaluate(text)


def test_the_label_is_where_the_texts_part() -> None:
    changed = Edit(["a 1", "b 27", "c"], "7", ["a 1", "b 24", "c"], "4", 1)
    text = "a 1\nb 27\nc"
    label = label_of([text], [[*text.encode()], [*b"a 1\nb 24\nc"]], [(i, i + 1) for i in range(len(text))], changed)
    assert label.token == text.index("7")
    assert np.flatnonzero(label.step_T).tolist() == [4, 5, 6, 7] and np.flatnonzero(label.alike_T).tolist() == [2, 6, 7]
    assert len(label.step_T) == len(text) + 1
