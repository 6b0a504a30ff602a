"""The tiny task and model: arithmetic, slips, the checker, the files, and that the shipped model is the one of its
record."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_cpu.tiny import prepare as prepare_module
from verl_cpu.tiny import shipped
from verl_cpu.tiny.make_models import WarmUpSettings
from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.prepare import prepare
from verl_cpu.tiny.sampling import prompt_ids
from verl_cpu.tiny.task import MAX_VALUE, Problem, StepError, boxed_answer, compute_score, find_errors, problems, solve


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return problems("train", 400, seed=5)


def test_problems_and_solutions(train: list[Problem]) -> None:
    """Answers agree with Python, problems depend on the seed alone, splits share none, and each slip is an error."""
    rng = random.Random(3)
    for problem in train:
        assert list(problem.values) == [eval(problem.text[:end]) for end in range(3, len(problem.text) + 1, 2)]
        assert problem.answer == eval(problem.text) and all(0 <= value <= MAX_VALUE for value in problem.values)
        solution = solve(problem, 0.0, random.Random(0))
        assert solution.endswith(f"\\boxed{{{problem.answer}}}") and find_errors(problem, solution) == []
        solution = solve(problem, 0.3, rng)
        assert boxed_answer(solution) == str(problem.answer) or find_errors(problem, solution)
    assert problems("train", 400, seed=5) == train and problems("train", 50, seed=5) == train[:50]
    assert problems("train", 400, seed=6) != train
    held_out = {problem.text for seed in range(3) for problem in problems("validation", 200, seed=seed)}
    assert not held_out & {problem.text for seed in range(3) for problem in problems("train", 1000, seed=seed)}
    for text in ("", "7+", "12+3", "7*5", "٣+٤"):
        with pytest.raises(ValueError, match="one-digit"):
            Problem.parse(text)
    assert solve(Problem.parse("7+5-3"), 0.0, random.Random(0)) == "7+5=12;12-3=9;\\boxed{9}"


CHAIN = Problem.parse("7+5-3")


FOUND_BY_HAND: list[tuple[str, list[StepError]]] = [
    ("7+5=12;12-3=9;\\boxed{9}", []),
    # Two slips that cancel give the correct answer and are two errors all the same.
    ("7+5=13;13-3=9;\\boxed{9}", [StepError(0, 4, 6, "result", "13", "12"), StepError(1, 12, 13, "result", "9", "10")]),
    # The result of step one is not carried on.
    ("7+5=12;13-3=10;\\boxed{10}", [StepError(1, 7, 11, "copy", "13-3", "12-3")]),
    # A step too many.
    ("7+5=12;12-3=9;9+1=10;\\boxed{10}", [StepError(2, 14, 17, "copy", "9+1", "")]),
    ("7+5=12;12-3=9;\\boxed{8}", [StepError(2, 21, 22, "answer", "8", "9")]),
    # Steps left out: the answer takes their place.
    ("7+5=12;\\boxed{12}", [StepError(1, 14, 16, "answer", "12", "9")]),
    ("\\boxed{9}", []),
    # The last complete box counts, and steps after it do not.
    ("\\boxed{1}7+5=12;12-3=9;\\boxed{9}1+1=3;", []),
    # Cut off: only what is written is checked.
    ("", []),
    ("7+5=11;11-3=8;\\boxed{8", [StepError(0, 4, 6, "result", "11", "12")]),
    # Negative values after a slip, and other ways of writing a number.
    ("7+5=2;2-3=-1;\\boxed{-1}", [StepError(0, 4, 5, "result", "2", "12")]),
    ("7+5=012;12-3=9;\\boxed{9}", [StepError(0, 4, 7, "result", "012", "12")]),
]


def test_find_errors_by_hand() -> None:
    for response, expected in FOUND_BY_HAND:
        assert find_errors(CHAIN, response) == expected, response
        assert all(response[error.start : error.end] == error.written for error in expected)
    assert [compute_score("", f"7+5=12;{end}", "12") for end in ("\\boxed{12}", "\\boxed{1}", "\\boxed{12")] == [
        1,
        0,
        0,
    ]
    assert boxed_answer("\\boxed{1}\\boxed{2}\\boxed{3") == "2" and boxed_answer("\\boxed{") is None


@pytest.mark.slow
def test_folder_has_verls_data_and_a_model_and_is_reused_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(tmp_path) and not prepare(tmp_path)
    for split, size in (("train", 4096), ("validation", 256)):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert [row["extra_info"]["problem"] for row in rows] == [problem.text for problem in problems(split, size)]
        for index, row in enumerate(rows):
            ((role, content),) = ((message["role"], message["content"]) for message in row["prompt"])
            assert role == "user" and row["extra_info"] == {"split": split, "index": index, "problem": content}
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(eval(content))}
    loaded, tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model"), build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert prompt_ids(loaded, CHAIN) == prompt_ids(tokenizer, CHAIN)
    assert (model.dtype, model.config.vocab_size) == (torch.float32, len(loaded))
    assert model.generation_config.eos_token_id == loaded.eos_token_id == tokenizer.eos_token_id
    assert prepare(tmp_path, seed=1) and prepare(tmp_path)
    monkeypatch.setattr(prepare_module, "code_digest", lambda: "changed code")
    assert prepare(tmp_path)


def test_the_record_is_that_of_todays_warm_up_and_of_these_weights() -> None:
    record = json.loads((shipped.FOLDER / shipped.RECORD).read_text())
    assert record["settings"] == asdict(WarmUpSettings())
    assert record["sha256"] == shipped.weights_digest()
    model, tokenizer = shipped.load_shipped()
    fresh = build_model(tokenizer, seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float())
