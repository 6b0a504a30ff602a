"""The study's task: worked solutions with filler and asides, and where they go wrong."""

from __future__ import annotations

import random

import pytest

from recipe.tiny.task import Problem, boxed_answer, problems
from study.task import MAX_RESPONSE_TOKENS, error_tokens, find_errors, solve, step_tokens, study_tokenizer

TOKENIZER = study_tokenizer()
PROBLEMS = problems("train", 200, seed=3)


def test_a_solution_without_slips_is_right_and_has_no_error() -> None:
    rng = random.Random(0)
    texts = [solve(problem, 0.0, rng) for problem in PROBLEMS]
    assert [boxed_answer(text) for text in texts] == [str(problem.answer) for problem in PROBLEMS]
    assert not any(find_errors(problem, text) for problem, text in zip(PROBLEMS, texts, strict=True))
    assert sum("(" in text for text in texts) > 100, "asides are part of the task"
    assert sum("then" in text for text in texts) > 20, "filler words are part of the task"


def test_a_wrong_answer_always_has_an_error_and_steps_slip_at_the_given_rate() -> None:
    rng = random.Random(1)
    pairs = [(problem, solve(problem, 0.3, rng)) for problem in PROBLEMS]
    for problem, text in pairs:
        if boxed_answer(text) != str(problem.answer):
            assert find_errors(problem, text)
    steps = sum(len(problem.steps) for problem in PROBLEMS)
    slips = sum(len(find_errors(problem, text)) for problem, text in pairs)
    assert slips / steps == pytest.approx(0.3, abs=0.05)


def test_every_solution_is_written_back_and_fits_the_length_limit() -> None:
    rng = random.Random(2)
    for problem in PROBLEMS:
        text = solve(problem, 0.2, rng)
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids) == text
        assert len(ids) < MAX_RESPONSE_TOKENS
    longest = "then first 18-9=19;(9+9=18)" * 6 + "then first \\boxed{19}"
    assert len(TOKENIZER.encode(longest)) < MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        ("so 7+5=13;13-3=10;\\boxed{10}", [("1", 7), ("3", 8)]),
        ("7+5=12;(2+2=5)now 12-3=9;\\boxed{9}", []),
        ("7+5=12;(2+2=5)now 12-3=8;\\boxed{8}", [("8", 23)]),
        ("(1+1=3)7+5=12;12-3=9;ok \\boxed{7}", [("7", 31)]),
        ("7+5=11;11-3=9;\\boxed{9}", [("1", 4), ("1", 5)]),
    ],
)
def test_error_tokens_are_those_of_the_first_error(response: str, wrong: list[tuple[str, int]]) -> None:
    problem = Problem.parse("7+5-3")
    ids = TOKENIZER.encode(response)
    found = error_tokens(problem, ids, TOKENIZER)
    offsets = [len(TOKENIZER.decode(ids[:index])) for index in range(len(ids))]
    assert sorted((TOKENIZER.decode([ids[index]]), offsets[index]) for index in found) == sorted(wrong)


def test_step_tokens_are_the_steps_without_asides_and_filler() -> None:
    ids = TOKENIZER.encode("ok 7+5=12;(2+2=5)now 12-3=9;\\boxed{9}")
    assert [TOKENIZER.decode([ids[i] for i in step]) for step in step_tokens(ids, TOKENIZER)] == ["7+5=12", "12-3=9"]
