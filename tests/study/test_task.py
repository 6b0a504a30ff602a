"""The study's task: worked solutions with filler and asides in three regimes, and where they go wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.tiny.task import boxed_answer
from study.task import (
    REGIMES,
    WORD,
    StudyProblem,
    read,
    read_tokens,
    regime,
    solve,
    study_problems,
    study_tokenizer,
)

TOKENIZER = study_tokenizer()
PROBLEMS = {name: study_problems(name, "train", 200, seed=3) for name in REGIMES}
CHAIN = StudyProblem("7+5-3", 7, (("+", 5), ("-", 3)), (None, None))
HIDDEN = StudyProblem("7+(2+3)-4", 7, (("+", 5), ("-", 4)), ((2, 3), None))


@pytest.mark.parametrize("name", REGIMES)
def test_a_wrong_answer_always_has_an_error_that_the_answer_depends_on(name: str) -> None:
    rng = random.Random(1)
    wrong = 0
    for problem in PROBLEMS[name]:
        text = solve(problem, regime(name, 3), rng)
        found = read(problem, text)
        assert {error.kind for error in found.errors} <= {"result", *(["word"] if name == "choices" else [])}, text
        if boxed_answer(text) != str(problem.answer):
            wrong += 1
            assert found.errors
    assert 40 < wrong < 180


@given(st.integers(0, 199), st.integers(0, 2**32))
def test_reading_a_choice_finds_the_errors_that_were_written(number: int, seed: int) -> None:
    """Written anew by hand: a right solution, in which one word or result is then changed, with all that follows from it."""
    problem, rng = PROBLEMS["choices"][number], random.Random(seed)
    changed, kind = rng.randrange(len(problem.steps)), rng.choice(["word", "result", "copy"])
    text, value, expected = "", problem.first, ""
    for step, (pair, right) in enumerate(zip(problem.choices, problem.steps, strict=True)):
        said = pair.index(right) ^ (step == changed and kind == "word")
        operator, term = pair[said ^ (step == changed and kind == "copy")]
        result = value + term if operator == "+" else value - term
        word, left = ("first", "then")[said], f"{value}{operator}{term}"
        if step == changed and kind == "result":
            result += 1
        parts = {"before": rng.choice(["", "ok ", "then so "]), "word": word, "copy": left, "result": str(result)}
        if step == changed:
            expected = f"{len(text + parts['before'])} {word}" if kind == "word" else parts[kind]
        text += f"{parts['before']}{word} {left}={result};" + rng.choice(["", "(1+1=3)"])
        value = result
    found = read(problem, f"{text}\\boxed{{{value}}}")
    assert [error.kind for error in found.errors] == [kind]
    (error,) = found.errors
    wrong = text[error.start : error.end]
    assert expected == (f"{error.start} {wrong}" if kind == "word" else wrong)


def test_words_by_hand() -> None:
    ids = [*TOKENIZER.encode("then ok first 7+5=12;(2+6=8)so 12-3=9;first \\boxed{9}"), TOKENIZER.eos_token_id]
    problem = StudyProblem(
        "7(+5|-2)(-3|+1)", 7, (("+", 5), ("-", 3)), (None, None), ((("+", 5), ("-", 2)), (("-", 3), ("+", 1)))
    )
    found = read_tokens(problem, ids, TOKENIZER)
    words = [place for place, role in enumerate(found.role_T) if role == WORD]
    assert [found.offsets[place] for place in words] == [8], (
        "the last one before a step; none is missed without an error"
    )
    assert found.decisive_T[words].all() and not found.reading.errors
    # Two wrong words that cancel each other count as wrong.
    other = StudyProblem(
        "7(+5|-2)(-5|+2)", 7, (("+", 5), ("-", 5)), (None, None), ((("+", 5), ("-", 2)), (("-", 5), ("+", 2)))
    )
    found = read(other, "then 7-2=5;then 5+2=7;\\boxed{7}")
    assert [error.kind for error in found.errors] == ["word", "word"] and other.answer == 7


def test_distractors_hide_two_terms_and_their_asides_decide() -> None:
    for problem in PROBLEMS["distractors"]:
        assert sum(hidden is not None for hidden in problem.sums) == 2
        assert eval(problem.text) == problem.answer
    text = "ok (2+3=6)7+6=13;(1+1=3)13-4=9;\\boxed{9}"
    found = read(HIDDEN, text)
    assert [(piece.aside, piece.step) for piece in found.pieces] == [(True, 0), (False, 0), (True, None), (False, 1)]
    assert [(text[e.start : e.end], e.start, e.kind) for e in found.errors] == [("6", 8, "result")]
    # The step takes the operand that is written, not the right one; without an aside it must be the right one.
    assert read(HIDDEN, "(2+3=6)7+5=12;12-4=8;\\boxed{8}").errors[1].kind == "copy"
    assert not read(HIDDEN, "7+5=12;12-4=8;\\boxed{8}").errors
    # Of several asides for one step the last counts.
    assert not read(HIDDEN, "(2+3=6)(2+3=5)7+5=12;12-4=8;\\boxed{8}").errors


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        ("so 7+5=13;13-3=10;\\boxed{10}", [("1", 7), ("3", 8)]),
        ("7+5=12;(2+2=5)now 12-3=9;\\boxed{9}", []),
        ("7+5=12;(2+2=5)now 12-3=8;\\boxed{8}", [("8", 23)]),
        ("(1+1=3)7+5=12;12-3=9;ok \\boxed{7}", [("7", 31)]),
        ("7+5=11;11-3=9;\\boxed{9}", [("1", 4), ("1", 5)]),
        ("7+5=12;13-3=10;\\boxed{10}", [("1", 7), ("3", 8), ("-", 9), ("3", 10)]),
        ("7+5=12;\\boxed{9}", []),
        ("words \\boxed{9} and 7+5=13", []),
    ],
)
def test_error_tokens_are_those_of_the_first_error(response: str, wrong: list[tuple[str, int]]) -> None:
    ids = [*TOKENIZER.encode(response), TOKENIZER.eos_token_id]
    found = read_tokens(CHAIN, ids, TOKENIZER)
    places = np.flatnonzero(found.error_T)
    assert [(TOKENIZER.decode([ids[place]]), found.offsets[place]) for place in places] == wrong
