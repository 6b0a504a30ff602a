"""GSM8K solutions with one changed result, and labelled solutions of a file."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from study.localisation.gsm8k_edits import CannotEditError, EditedSolution, edit_solution, evaluate
from study.localisation.solutions import read_solutions

QUESTION = "Ann picks 3 baskets of 28 apples and sells half of them at $1.50 each. How much does she earn in 4 weeks?"
ANSWER = (
    "She picks 3*28=<<3*28=84>>84 apples.\nShe sells 84/2=<<84/2=42>>42 of the 84 apples.\n"
    "She earns 42*$1.50=$<<42*1.5=63>>63.00 a week.\nIn all 63 * 4 = $<<63*4=252>>252.\n#### 252"
)


def broken_calculations(edit: EditedSolution) -> list[int]:
    """Lines with a calculation that does not hold."""
    return [
        number
        for number, line in enumerate(edit.annotated)
        for left, right in re.findall(r"<<([^<>]*)=([^<>=]*)>>", line)
        if evaluate(left) != Fraction(right)
    ]


def test_the_change_is_carried_on():
    edits = [edit_solution(QUESTION, ANSWER, str(seed)) for seed in range(60)]
    assert {edit.wrong_step for edit in edits} == {0, 1, 2, 3}
    for edit in edits:
        assert broken_calculations(edit) == [edit.wrong_step]
        original = [step.text for step in edit.original_steps]
        changed = [step.text for step in edit.steps]
        assert changed[: edit.wrong_step] == original[: edit.wrong_step]
        assert all(a != b for a, b in zip(changed[edit.wrong_step :], original[edit.wrong_step :], strict=True))
        start, past = edit.steps[edit.wrong_step].results[edit.wrong_result]
        assert len(changed[edit.wrong_step][start:past]) == len(("84", "42", "63.00", "252")[edit.wrong_step])
        assert edit.original_answer == "252" and edit.answer != "252" and changed[3].endswith(f"${edit.answer}.")
    first = next(edit for edit in edits if edit.wrong_step == 0)
    apples = int(first.steps[0].text.removeprefix("She picks 3*28=").removesuffix(" apples."))
    assert first.steps[1].text == f"She sells {apples}/2={apples // 2} of the {apples} apples."
    assert first.steps[2].text == f"She earns {apples // 2}*$1.50=${1.5 * (apples // 2):.2f} a week."
    assert edit_solution(QUESTION, ANSWER, "7") == edit_solution(QUESTION, ANSWER, "7")


@pytest.mark.parametrize("text", ["2**9", "__import__('os')", "1/0", "(" * 300, "a+1", "1e9", "", "3//2", "True"])
def test_only_arithmetic_is_evaluated(text: str):
    if text == "1e9":
        assert evaluate(text) == 10**9
        return
    with pytest.raises(CannotEditError):
        evaluate(text)


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_gsm8k_becomes_labelled_solutions(tmp_path: Path):
    path = write(
        tmp_path / "gsm8k.jsonl",
        {"question": QUESTION, "answer": ANSWER, "idx": 5},
        {"question": "How many?", "answer": "Five.\n#### 5"},
    )
    found = read_solutions(path, seed=1, twins=True)
    assert found.left_out == {"fewer than two steps": 1}
    wrong, twin = found.solutions
    assert (wrong.id, wrong.twin, twin.id, twin.twin) == ("5", False, "5", True)
    assert twin.response.endswith("In all 63 * 4 = $252.\nThe final answer is \\boxed{252}.")
    assert "".join(twin.response[a:b] for a, b in twin.steps) + "The final answer is \\boxed{252}." == twin.response
    assert [twin.response[a:b] for a, b in twin.results] == ["84", "42", "63.00", "252"]
    assert wrong.label == twin.label == wrong.wrong_result
    assert wrong.as_response().reward == 0 and twin.as_response().reward == 1
    assert wrong.as_response().gold == "252"
    labels = wrong.as_response().labels
    assert wrong.response[slice(*labels["wrong_step"])].startswith(twin.response[slice(*twin.steps[twin.label])][:9])
    assert "wrong_step" not in twin.as_response().labels
    assert read_solutions(path, seed=1).solutions == (wrong,) or list(read_solutions(path, seed=1).solutions) == [wrong]
