"""ProcessBench's solutions as lines."""

import pytest

from bench import convert
from tests.bench.common import lines_in, write_lines


def lines_of(tmp_path, *records: object) -> list[dict]:
    path = write_lines(tmp_path / "in.jsonl", records)
    convert.main(["processbench", str(path), str(tmp_path / "out.jsonl")])
    return lines_in(tmp_path / "out.jsonl")


def test_lines_that_no_table_can_use_are_counted_and_left_out(tmp_path, capsys):
    common = {"id": "g-0", "generator": "m", "problem": "q", "steps": ["a", "b \\boxed{1}"]}
    incorrect = common | {"final_answer_correct": False, "label": 1}
    correct = common | {"final_answer_correct": True, "label": -1}
    # Methods that take gradients of the answer would have no scores of the third.
    lines = lines_of(tmp_path, incorrect, correct, incorrect | {"steps": ["a", "b"]})
    assert sorted((line["reward"], line["error"]) for line in lines) == [
        (0.0, 1),
        (1.0, None),
    ]
    assert "boxed" in lines[0]["prompt"][0]["content"]
    assert "1 errors, 1 controls, 1 without an answer" in capsys.readouterr().out


def test_a_file_of_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not of the format processbench"):
        lines_of(tmp_path, {"a": 1})
