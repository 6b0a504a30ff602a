"""Two tasks of worked arithmetic in which the tokens that decide the answer are known for every response.

A solution puts filler words before each step and, now and then, an aside in brackets after it:

    problem    7+5-3
    solution   ok so 7+5=12;(2+6=8) then 12-3=9; now \\boxed{9}

The tasks differ in the errors of the solutions that a model is fine-tuned on, and so in the errors of the model:

- ``misconceptions``: for a quarter of all sums there is one wrong number that is written with probability 0.7 (for a fifth of
  them 0.9), wherever the sum is; anything else slips with probability 0.02. The model believes these wrong sums.
- ``choices``: the problem offers two operations for each step. The first one is correct where its term is 5 or more, else the
  second one, and the solution says by a word which one it takes: ``first`` or ``then``. For a quarter of the first operations
  the wrong word is written, at the same rates; an eighth of the sums is misconceived:

    problem    7(+5|-3)(-2|+4)
    solution   ok first 7+5=12;then 12+4=16;(2+6=8)\\boxed{16}

A wrong result or word enters the next steps and costs the answer; a wrong aside costs nothing. Filler is a free choice; in
``choices`` the two words are no filler.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from grail_advantage.answers.span import token_bytes
from verl_cpu.tiny.model import WHOLE_WORDS, build_tokenizer
from verl_cpu.tiny.task import MAX_VALUE, STEP, Problem, Split
from verl_cpu.tiny.task import problems as chain_problems

TASKS = ("misconceptions", "choices")
FILLER = ("ok", "so", "then", "now", "hm", "we", "get", "first")
MAX_FILLER = 2
ASIDE_RATE = 0.3
MISCONCEIVED_SHARE, MISCONCEIVED_RATE = 0.25, 0.7
STUBBORN_SHARE, STUBBORN_RATE = 0.2, 0.9
"""Of what is misconceived, a share that is written wrongly more often."""
SLIP_RATE = 0.02
WORDS = ("first", "then")
"""Which of two offered operations a step takes."""
LARGE_TERM = 5
"""From here on the first one is correct."""
MAX_RESPONSE_TOKENS = 144
"""Six steps, each with two filler words and an aside, and the box."""

OTHER, FILL, LEFT, RESULT, END, ASIDE, BOX, WORD = range(8)
"""Kinds of response tokens. ``BOX``: the last complete box and all after it; ``WORD``: the word for a step's operation."""

_ASIDE = re.compile(r"\([^()]*\)")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_WORD = re.compile("|".join(WORDS))
_token_bytes = lru_cache(maxsize=4)(token_bytes)

Sum = tuple[int, str, int]
Operation = tuple[str, int]


@dataclass(frozen=True)
class BenchProblem(Problem):
    """A chain of sums, which may offer two operations for every step."""

    choices: tuple[tuple[Operation, Operation], ...] = ()
    """For every step the two operations that the problem offers, of which ``steps`` has the correct one."""


@dataclass(frozen=True)
class Errors:
    """Errors in written solutions."""

    slip_rate: float = 0.0
    misconceived: Mapping[Sum, tuple[int, float]] = field(default_factory=dict)
    """The wrong number of a sum, and how often it is written."""
    misjudged: Mapping[Operation, float] = field(default_factory=dict)
    """First offered operations at which the wrong word is written, and how often."""


class WrittenStep(NamedTuple):
    """A written step, in characters of the response; ``word`` says which operation it takes."""

    start: int
    end: int
    result: tuple[int, int]
    word: tuple[int, int] | None


class Reading(NamedTuple):
    """The content of a response."""

    steps: list[WrittenStep]
    wrong: bool
    """Whether anything is wrong: a result, a left side, a word, or the answer."""
    box: tuple[int, int] | None
    """The content of the last complete box."""
    box_start: int
    """Start of that box; the response's length without one."""


@dataclass(frozen=True)
class TokenReading:
    """A response by tokens; a token is what its first character is."""

    text: str
    offsets: list[int]
    """Character at which each token starts, and the response's length."""
    reading: Reading
    kind_T: np.ndarray
    """int64."""

    @property
    def step_T(self) -> np.ndarray:
        """int64; the step of each token. A step goes up to its end, the last one to the response's."""
        return np.cumsum(np.concatenate([[0], self.kind_T[:-1] == END]))


def task_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer with the filler words as tokens of their own."""
    return build_tokenizer((*WHOLE_WORDS, *FILLER))


@cache
def task_errors(task: str, seed: int) -> Errors:
    """The errors of a task's solutions; the seed draws what is misconceived."""
    rng, words = random.Random(f"{task} {seed}"), task == "choices"
    sums = [one for one in product(range(MAX_VALUE + 1), "+-", range(10)) if 0 <= apply(*one) <= MAX_VALUE]
    chosen = rng.sample(sums, round(MISCONCEIVED_SHARE * len(sums) / (1 + words)))
    sums_at = {one: (_other(apply(*one), rng), rate) for one, rate in _with_rates(chosen)}
    offered = list(product("+-", range(10)))
    wrongly = rng.sample(offered, round(MISCONCEIVED_SHARE * len(offered))) if words else []
    return Errors(SLIP_RATE, sums_at, dict(_with_rates(wrongly)))


def task_problems(task: str, split: Split, size: int, seed: int) -> list[BenchProblem]:
    """Different problems of a task, the same ones for the same arguments; no problem is in both splits."""
    rng = random.Random(f"{task} {split} {seed}")
    problems = []
    for chain in chain_problems(split, size, seed=seed):
        choices = _choices(chain, rng) if task == "choices" else ()
        terms = ["({}{}|{}{})".format(*first, *second) for first, second in choices]
        text = chain.text if not choices else "".join([str(chain.first), *terms])
        problems.append(BenchProblem(text, chain.first, chain.steps, choices))
    return problems


def solve(problem: BenchProblem, errors: Errors, rng: random.Random) -> str:
    """A worked solution with these errors."""
    value, parts = problem.first, []
    filler = [word for word in FILLER if word not in WORDS] if problem.choices else FILLER
    for step, (operator, term) in enumerate(problem.steps):
        word = ""
        if problem.choices:
            offered = problem.choices[step]
            wrong = rng.random() < errors.misjudged.get(offered[0], errors.slip_rate)
            taken = offered.index((operator, term)) ^ wrong
            operator, term = offered[taken]
            word = f"{WORDS[taken]} "
        result = _written((value, operator, term), errors, rng)
        parts.append(f"{_filler(filler, rng)}{word}{value}{operator}{term}={result};")
        value = result
        if rng.random() < ASIDE_RATE:
            left, right = rng.randint(0, 9), rng.randint(0, 9)
            parts.append(f"({left}+{right}={_written((left, '+', right), errors, rng)})")
    return "".join(parts) + f"{_filler(filler, rng)}\\boxed{{{value}}}"


def apply(value: int, operator: str, term: int) -> int:
    """The value of a sum."""
    return value + term if operator == "+" else value - term


def read(problem: BenchProblem, response: str) -> Reading:
    """Find every written step and whether anything is wrong. Any text is accepted."""
    boxes = list(_BOXED.finditer(response))
    box_start = boxes[-1].start() if boxes else len(response)
    blanked = _ASIDE.sub(lambda aside: " " * len(aside.group()), response[:box_start])
    steps: list[WrittenStep] = []
    value, wrong, at = problem.first, False, 0
    for number, match in enumerate(STEP.finditer(blanked)):
        first, operator, second, result = match.groups()
        word = operation = None
        if number < len(problem.steps):
            operation = problem.steps[number]
            if problem.choices:
                *_, word = [None, *_WORD.finditer(blanked, at, match.start())]
                if word:
                    operation = problem.choices[number][WORDS.index(word.group())]
                wrong |= operation != problem.steps[number]
        wrong |= operation is None or (first, operator, second) != (str(value), operation[0], str(operation[1]))
        wrong |= result != str(apply(int(first), operator, int(second)))
        steps.append(WrittenStep(match.start(), match.end(), match.span(4), word and word.span()))
        value, at = int(result), match.end()
    box = boxes[-1].span(1) if boxes else None
    if box is not None:
        for operation in problem.steps[len(steps) :]:
            value = apply(value, *operation)
        wrong |= response[slice(*box)] != str(value)
    return Reading(steps, wrong, box, box_start)


def read_tokens(problem: BenchProblem, response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> TokenReading:
    """The same by tokens."""
    table = _token_bytes(tokenizer)
    covered = [table[token] for token in response_ids]
    text, offsets = b"".join(covered).decode("latin-1"), [0, *accumulate(len(piece) for piece in covered)]
    reading = read(problem, text)
    kinds = np.full(len(text) + 1, OTHER)
    for match in re.finditer("|".join([*FILLER, " "]), text):
        kinds[slice(*match.span())] = FILL
    for match in _ASIDE.finditer(text, 0, reading.box_start):
        kinds[slice(*match.span())] = ASIDE
    for step in reading.steps:
        kinds[step.start : step.end] = LEFT
        kinds[slice(*step.result)] = RESULT
        if text[step.end : step.end + 1] == ";":
            kinds[step.end] = END
        if step.word is not None:
            kinds[slice(*step.word)] = WORD
    if reading.box is not None:
        kinds[reading.box_start :] = BOX
    return TokenReading(text, offsets, reading, kinds[np.array(offsets[:-1], dtype=np.int64)])


def _written(one: Sum, errors: Errors, rng: random.Random) -> int:
    """The number that is written as the result of a sum."""
    correct = apply(*one)
    if one in errors.misconceived:
        wrong, rate = errors.misconceived[one]
        if rng.random() < rate:
            return wrong
    return correct if rng.random() >= errors.slip_rate else _other(correct, rng)


def _other(value: int, rng: random.Random) -> int:
    return rng.choice([other for other in range(MAX_VALUE + 1) if other != value])


def _filler(words: Sequence[str], rng: random.Random) -> str:
    return "".join(f"{word} " for word in rng.choices(words, k=rng.randint(0, MAX_FILLER)))


def _with_rates(chosen: Sequence[Any]) -> Iterator[tuple[Any, float]]:
    """Everything that is misconceived, and how often it is written wrongly."""
    stubborn = round(STUBBORN_SHARE * len(chosen))
    for number, one in enumerate(chosen):
        yield one, STUBBORN_RATE if number < stubborn else MISCONCEIVED_RATE


def _choices(chain: Problem, rng: random.Random) -> tuple[tuple[Operation, Operation], ...]:
    """Each step's operation and another one, in the order that makes it correct; the values of both are in range."""
    pairs = []
    for before, correct in zip((chain.first, *chain.values), chain.steps, strict=False):
        first = correct[1] >= LARGE_TERM
        others = product("+-", range(10 if first else LARGE_TERM))
        other = rng.choice([one for one in others if one != correct and 0 <= apply(before, *one) <= MAX_VALUE])
        pairs.append((correct, other) if first else (other, correct))
    return tuple(pairs)
