"""Labelled files of others, and equations that are false, by hand and on real text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench import convert, sample
from bench.sample import evaluate, first_false
from grail_advantage.analyze.lines import label_ranges, read_responses
from tests.recipe.test_reward import DATA
from verl_cpu.tiny.model import build_model, build_tokenizer


@pytest.mark.parametrize(
    ("text", "right_side"),
    [
        ("She makes 9 * 2 = $19 every day.", "$19"),
        ("\\(1/3 \\times 18 = 7\\) flamingos", "7"),
        ("First 16 - 3 - 4 = 9, then 9 - 10 = 1.", "1"),
        ("He pays 1,000 + 200 = 1,300 dollars", "1,300"),
        ("\\[ 25 \\div 5 = 6 \\]", "6"),
        ("20% * 50 = 11", "11"),
        ("10 / 4 = 2.4", "2.4"),
        ("10 * (2 + 3) = 50 = 25 * 3", "25 * 3"),
    ],
)
def test_false_equations(text: str, right_side: str) -> None:
    start, end = first_false(text)
    assert text[start:end] == right_side


@pytest.mark.parametrize(
    "text",
    [
        "She makes 9 * 2 = $18 every day.",
        "half of 10 + 2 = 7",
        "3 hours * 2 + 5 = 11",
        "10 / 3 = 3.33 and 2 / 3 = 0.67 and 2 / 3 = 0.66",
        "20% * 50 = 10 and 1 / 4 = 25%",
        "4x - 8 = 339, so x * 2 = 7",
        "f(5) = 5 + 2 and (5/6)(5/6) = 25/36",
        "63 \\div 8 = 7 with a remainder of 7",
        "9 \\div 7 = 1 \\text{ remainder } 2",
        "p(42) = 42^2 - 42 + 41",
        "x = 3, y = 4",
        "5 = 5 apples; 12 = 7",
        "16 = 4 + 9 - 12 \\cos C",
        "1 / 0 = 3",
        "1.5.2 + 3 = 9",
        "",
    ],
)
def test_what_is_no_false_equation(text: str) -> None:
    assert first_false(text) is None


def test_expressions_are_exact() -> None:
    assert evaluate("1,000*(2+.5)/-4") == -625 and evaluate("50%") * 2 == 1
    assert evaluate("0.1+0.2") * 10 == 3
    for text in ("2**3", "x", "1/0", "", "9" * 300):
        assert evaluate(text) is None


@pytest.mark.skipif(not (DATA / "gsm8k_test.jsonl").exists(), reason="no GSM8K")
def test_gsm8ks_solutions_have_no_false_equation_and_changed_ones_do() -> None:
    """Two of 1,319 have one: a chain of equals signs that goes on after a result, and $32 - $20 = $300."""
    found, changed, wrong = 0, 0, []
    for line in (DATA / "gsm8k_test.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        plain = re.sub(r"<<[^<>]*>>", "", answer)
        if (of := first_false(plain)) is not None:
            wrong.append(plain[slice(*of)])
            continue
        for match in list(re.finditer(r"<<[^<>]*>>(\d+)(?![\d.,])", answer))[:1]:
            other = answer[: match.start(1)] + str(int(match[1]) + 1) + answer[match.end(1) :]
            place = len(re.sub(r"<<[^<>]*>>", "", other[: match.start(1)]))
            of = first_false(re.sub(r"<<[^<>]*>>", "", other))
            changed += 1
            found += of is not None and of[0] <= place < of[1]
            assert of is None or of[0] <= place < of[1]
    assert found > 0.6 * changed and wrong == ["$1.50+$3.00", "$300"]


TOKENIZER = build_tokenizer()


def lines_of(name: str, tmp_path: Path, *records: object) -> list[dict]:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    convert.main([name, str(path), str(tmp_path / "out.jsonl")])
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_processbench_and_bigbench_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that no table can use are counted and left out."""
    common = {"id": "g-0", "generator": "m", "problem": "q", "steps": ["a", "b \\boxed{1}"]}
    wrong, right = common | {"final_answer_correct": False}, common | {"final_answer_correct": True}
    records = wrong | {"label": 1}, wrong | {"label": -1}, right | {"label": -1}, right | {"label": 0}
    lines = lines_of("processbench", tmp_path, *records, wrong | {"label": 0, "steps": ["a", "b"]})
    assert sorted((line["reward"], line["error"]) for line in lines if line["error"]) == [(0.0, 1)]
    assert sorted(line["reward"] for line in lines) == [0.0, 1.0] and "boxed" in lines[0]["prompt"][0]["content"]
    printed = capsys.readouterr().out
    for said in ("1 errors", "1 controls", "1 without an answer", "1 correct in spite", "1 incorrect, no first error"):
        assert said in printed
    record = {
        "input": "q",
        "steps": ["a", "So the answer is (A)."],
        "target": "(A)",
        "answer": "A",
        "mistake_index": None,
    }
    (line,) = lines_of("bigbench_mistake", tmp_path, record)
    assert line["reward"] == 1 and line["error"] is None


def test_champ(tmp_path: Path) -> None:
    text = "One.\nTwo is wrong.\nThree."
    entries = {"M|way": {"text": text, "start_idx": 5, "end_idx": 18, "author": "M"}}
    entries["M|other"] = {"text": "All right.", "start_idx": None, "end_idx": None, "author": "M"}
    asked = [{"role": "System", "text": "s"}, {"role": "User", "text": "u"}, {"role": "Model.M", "text": text}]
    problem = {"_text": "q", "fws_annotations": entries, "conversations": {"M|way": {"messages": asked}}}
    lines_of("champ", tmp_path, {"problems": {"P": problem}})
    rows = {row.id: row for row in read_responses(tmp_path / "out.jsonl")}
    wrong, right = rows["P M|way"], rows["P M|other"]
    assert wrong.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (span,) = label_ranges(wrong, text)[1]
    assert text[slice(*span)] == "Two is wrong." and (wrong.reward, right.reward, right.error) == (0, 1, None)


def test_prm800k(tmp_path: Path) -> None:
    """Alternatives at the step where labelling ended do not count, only what the solution says."""
    steps = ["one", "two", "three\n\n# Answer\n\n7"]
    question = {"problem": "q", "ground_truth_answer": "8", "pre_generated_answer": "7", "pre_generated_steps": steps}

    def rated(*ratings: dict[str, int]) -> list[dict]:
        return [
            {"completions": [{"text": t, "rating": r} for t, r in of.items()], "chosen_completion": 0} for of in ratings
        ]

    common = {"question": question, "is_quality_control_question": False}
    wrong = rated({"one": 1}, {"another": 1, "two": -1})
    right = rated({"one": 1}, {"two": 0, "bad": -1}, {steps[2]: 1})
    records = [
        common | {"label": {"steps": wrong, "finish_reason": "found_error"}},
        common
        | {"label": {"steps": right, "finish_reason": "solution"}, "question": question | {"ground_truth_answer": "7"}},
        common | {"label": {"steps": wrong, "finish_reason": "give_up"}},
        common | {"label": {"steps": wrong, "finish_reason": "found_error"}, "is_quality_control_question": True},
    ]
    lines = lines_of("prm800k", tmp_path, *records)
    assert sorted((line["reward"], line["error"] is None) for line in lines) == [(0.0, False), (1.0, True)]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not of the format prm800k"):
        lines_of("prm800k", tmp_path, {"a": 1})


def test_sampling_labels_the_models_own_errors_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    written = ["2+3=5\n5*2=10\n\\boxed{10}", "2+3=6\n6*2=12\n\\boxed{12}", "I do not know"]
    asked: list[int] = []

    def written_ones(model, tokenizer, prompts, uniform_BT, temperature) -> list[list[int]]:
        asked.append(len(prompts))
        assert uniform_BT.shape == (len(prompts), 320) and np.unique(uniform_BT).size == uniform_BT.size
        return [TOKENIZER.encode(written[place % 3]) for place in range(len(prompts))]

    monkeypatch.setattr(sample, "model_of", lambda *given: (TOKENIZER, lambda: build_model(TOKENIZER, 0)))
    monkeypatch.setattr(sample, "sample", written_ones)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"question": f"q{n}", "answer": "so\n#### 10"}) for n in range(20)))
    out = tmp_path / "out.jsonl"
    arguments = [str(questions), str(out), "--model", "tiny", "--samples", "3", "--problems"]
    sample.main([*arguments, "16"])
    sample.main([*arguments, "20"])
    assert asked == [12] * 5
    for option, value in (("length", "64"), ("temperature", "0.5"), ("samples", "4"), ("model", "smollm2")):
        with pytest.raises(SystemExit, match=f"another {option}"):
            sample.main([*arguments, "20", f"--{option}", value])
    rows = read_responses(out)
    assert len(rows) == 60 and [(row.error, row.reward) for row in rows[:3]] == [(None, 1), ((4, 5), 0), (None, 0)]
