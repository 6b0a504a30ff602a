"""The study's task: worked solutions with filler and asides in three regimes, and where they go wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from recipe.tiny.task import boxed_answer
from study.task import (
    ASIDE,
    ASIDE_RESULT,
    BOX,
    END,
    FILL,
    LEFT,
    MAX_RESPONSE_TOKENS,
    MISCONCEIVED_SHARE,
    OTHER,
    REGIMES,
    RESULT,
    StudyProblem,
    read,
    read_tokens,
    regime,
    right_solution,
    solve,
    study_problems,
    study_tokenizer,
    text_of,
)

TOKENIZER = study_tokenizer()
PROBLEMS = {name: study_problems(name, "train", 200, seed=3) for name in REGIMES}
CHAIN = StudyProblem("7+5-3", 7, (("+", 5), ("-", 3)), (None, None))
HIDDEN = StudyProblem("7+(2+3)-4", 7, (("+", 5), ("-", 4)), ((2, 3), None))


@pytest.mark.parametrize("name", REGIMES)
def test_a_right_solution_is_right_and_has_no_error(name: str) -> None:
    rng = random.Random(0)
    for problem in PROBLEMS[name]:
        text = right_solution(problem, rng)
        assert boxed_answer(text) == str(problem.answer)
        found = read(problem, text)
        assert not found.errors and len(found.steps) == len(problem.steps)


@pytest.mark.parametrize("name", REGIMES)
def test_a_wrong_answer_always_has_an_error_that_the_answer_depends_on(name: str) -> None:
    rng = random.Random(1)
    wrong = 0
    for problem in PROBLEMS[name]:
        text = solve(problem, regime(name, 3), rng)
        found = read(problem, text)
        assert not any(error.kind != "result" for error in found.errors), text
        if boxed_answer(text) != str(problem.answer):
            wrong += 1
            assert found.errors
    assert 40 < wrong < 180


@pytest.mark.parametrize("name", REGIMES)
def test_every_solution_is_written_back_and_fits_the_length_limit(name: str) -> None:
    rng = random.Random(2)
    lengths = []
    for problem in PROBLEMS[name]:
        text = solve(problem, regime(name, 0), rng)
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids) == text == text_of(ids, TOKENIZER)[0]
        lengths.append(len(ids))
    assert max(lengths) < MAX_RESPONSE_TOKENS


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


@pytest.mark.parametrize("name", ["misconceptions", "slips"])
def test_splits_are_disjoint_and_each_seed_has_its_own_problems(name: str) -> None:
    held_out = {problem.text for problem in study_problems(name, "validation", 100, seed=3)}
    assert not held_out & {problem.text for problem in PROBLEMS[name]}
    assert held_out != {problem.text for problem in study_problems(name, "validation", 100, seed=4)}


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


def test_every_token_has_its_role() -> None:
    text = "ok 7+5=12;(2+2=5)12-3=9;x\\boxed{9}"
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    found = read_tokens(CHAIN, ids, TOKENIZER)
    roles = [FILL] * 2 + [LEFT] * 4 + [RESULT] * 2 + [END] + [ASIDE] * 5 + [ASIDE_RESULT, ASIDE]
    roles += [LEFT] * 5 + [RESULT, END, OTHER] + [BOX] * 5 + [BOX]
    assert found.role_T.tolist()[: len(roles)] == roles[: len(found.role_T)]
    decisive = "".join(TOKENIZER.decode([ids[place]]) for place in np.flatnonzero(found.decisive_T))
    assert decisive == "7+5=12;12-3=9;\\boxed{9}"
    hidden = [*TOKENIZER.encode("(2+3=5)7+5=12;(2+2=5)12-4=8;\\boxed{8}"), TOKENIZER.eos_token_id]
    found = read_tokens(HIDDEN, hidden, TOKENIZER)
    decisive = "".join(TOKENIZER.decode([hidden[place]]) for place in np.flatnonzero(found.decisive_T))
    assert decisive == "(2+3=5)7+5=12;12-4=8;\\boxed{8}"


def test_slips_come_at_their_rate_and_a_misconception_as_its_own_number() -> None:
    rng, wrong, repeated = random.Random(4), {"slips": [], "misconceptions": []}, []
    misconceived = regime("misconceptions", 0).misconceived
    for name in wrong:
        for problem in PROBLEMS[name]:
            for piece in read(problem, solve(problem, regime(name, 0), rng)).pieces:
                wrong[name].append(piece.result != piece.right_result)
                known = misconceived.get((int(piece.left[0]), piece.left[1], int(piece.left[2])))
                if name == "misconceptions" and known:
                    repeated.append(piece.result == str(known[0]))
    assert np.mean(wrong["slips"]) == pytest.approx(0.2, abs=0.03)
    share = MISCONCEIVED_SHARE * (0.8 * 0.7 + 0.2 * 0.9)
    assert np.mean(wrong["misconceptions"]) == pytest.approx(share + 0.02, abs=0.05)
    assert np.mean(repeated) == pytest.approx(0.74, abs=0.06)
    assert regime("misconceptions", 1).misconceived != misconceived, "each seed has its own"
