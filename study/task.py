"""Worked arithmetic with filler words and asides, in four regimes: which tokens decide the answer is known for every response.

The problems are those of :mod:`recipe.tiny.task`. A solution puts filler words before each step and, now and then, an aside
in brackets after it:

    problem    7+5-3
    solution   ok so 7+5=12;(2+6=8) then 12-3=9; now \\boxed{9}

The regimes differ in what goes wrong when solutions are written, and so in what the warmed-up model gets wrong:

- ``slips``: every result is wrong with probability 0.2, by any other number. The model knows the sums; it only slips.
- ``misconceptions``: for a quarter of all sums there is one wrong number that is written with probability 0.7 (for a fifth of
  them 0.9), wherever the sum is; anything else slips with probability 0.02. The model believes these wrong sums.
- ``distractors``: as ``slips``, but two terms of the problem are sums themselves. The solution works each out in an aside
  before the step that uses it, so that some asides decide the answer and others do not, and only the problem shows which:

    problem    7+(2+3)-4
    solution   so (2+3=5)7+5=12;(2+6=8) 12-4=8; now \\boxed{8}

- ``choices``: as ``misconceptions``, but the problem offers two operations for each step. The first one is right where its
  term is 5 or more, else the second one, and the solution says by a word which one it takes: ``first`` or ``then``. For a
  quarter of the first operations the wrong word is written, at the rates of the sums, of which half as many are misconceived:

    problem    7(+5|-3)(-2|+4)
    solution   ok first 7+5=12;then 12+4=16;(2+6=8)\\boxed{16}

A wrong result or word enters the next steps and costs the answer; a wrong aside that no step uses costs nothing. Filler is free
choice; in ``choices`` the two words are no filler.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from grail_advantage.answers.span import token_bytes
from recipe.tiny.model import WHOLE_WORDS, build_tokenizer
from recipe.tiny.task import MAX_VALUE, STEP, Problem, Split
from recipe.tiny.task import problems as chain_problems

FILLER = ("ok", "so", "then", "now", "hm", "we", "get", "first")
MAX_FILLER = 2
ASIDE_RATE = 0.3
HIDDEN_TERMS = 2
SLIP_RATE = 0.2
MISCONCEIVED_SHARE, MISCONCEIVED_RATE = 0.25, 0.7
STUBBORN_SHARE, STUBBORN_RATE = 0.2, 0.9
"""Of the misconceived sums, a share that is misconceived more often."""
REMAINING_SLIP_RATE = 0.02
REGIMES = ("misconceptions", "slips", "distractors", "choices")
WORDS = ("first", "then")
"""Which of two offered operations a step takes."""
LARGE_TERM = 5
"""From here on the first one is right."""
MAX_RESPONSE_TOKENS = 144
"""Six steps, each with two filler words and an aside, and the box; with two more asides it is hardly ever longer."""

# Roles of response tokens.
OTHER, FILL, LEFT, RESULT, END, ASIDE, ASIDE_RESULT, BOX, WORD = range(9)
"""``LEFT``: a step up to its ``=``; ``END``: the ``;`` after it; ``ASIDE``: brackets and left side of an aside; ``BOX``: the
last complete box and all after it, the end token too; ``WORD``: the word that says which operation a step takes; ``OTHER``:
everything else, an end token without a box among it."""

_ASIDE_PATTERN = re.compile(r"\([^()]*\)")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_WORD = re.compile("|".join(WORDS))

Sum = tuple[int, str, int]
Operation = tuple[str, int]


@dataclass(frozen=True)
class StudyProblem(Problem):
    """A chain, some of whose terms may be written as a sum in brackets, or which offers two operations for every step."""

    sums: tuple[tuple[int, int] | None, ...] = ()
    """For every step the two numbers that its term is the sum of, or ``None`` where the problem gives the term itself."""
    choices: tuple[tuple[Operation, Operation], ...] = ()
    """For every step the two operations that the problem offers, of which ``steps`` has the right one; empty without them."""


@dataclass(frozen=True)
class Regime:
    """Errors in written solutions."""

    name: str
    slip_rate: float
    misconceived: Mapping[Sum, tuple[int, float]] = field(default_factory=dict)
    """Sums that are misconceived: the wrong number, and how often it is written."""
    misjudged: Mapping[Operation, float] = field(default_factory=dict)
    """First offered operations at which the wrong word is written, and how often."""


@dataclass(frozen=True)
class Piece:
    """A written sum, with character offsets into the response."""

    start: int
    end: int
    result_start: int
    result_end: int
    left: tuple[str, str, str]
    """First number, operator, second number."""
    result: str
    right_result: str
    step: int | None
    """The number of the step that it is, or that uses it; ``None`` for an aside that none uses."""
    aside: bool
    word: tuple[int, int] | None = None
    """Characters of the word that says which operation the step takes."""

    @property
    def decisive(self) -> bool:
        """Whether the answer depends on it."""
        return self.step is not None


@dataclass(frozen=True)
class Error:
    """The characters of an error.

    ``result``: a result that does not follow from its own left side, in a step or in an aside that a step uses; ``copy``: a
    left side that is not the running value with the problem's next operator and term (or the result written for it in an
    aside), or not that of its own word; ``word``: the word for the wrong operation; ``answer``: a boxed text that is not the
    running value.
    """

    start: int
    end: int
    kind: Literal["result", "copy", "word", "answer"]


@dataclass(frozen=True)
class Reading:
    """The content of a response."""

    pieces: list[Piece]
    errors: list[Error]
    """In the order of the text."""
    box: tuple[int, int] | None
    """The content of the last complete box."""
    box_start: int
    """Where that box begins; the response's length without one."""

    @property
    def steps(self) -> list[Piece]:
        """The written steps, asides left out."""
        return [piece for piece in self.pieces if not piece.aside]


def study_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer with the filler words as tokens of their own."""
    return build_tokenizer((*WHOLE_WORDS, *FILLER))


@cache
def regime(name: str, seed: int) -> Regime:
    """A regime; which sums are misconceived depends on the seed.

    Raises:
        ValueError: an unknown name.
    """
    if name not in REGIMES:
        raise ValueError(f"regime={name!r} is unknown; choose one of {', '.join(REGIMES)}")
    if name not in ("misconceptions", "choices"):
        return Regime(name, SLIP_RATE)
    rng = random.Random(f"{name} {seed}")
    sums = [
        (value, operator, term)
        for value in range(MAX_VALUE + 1)
        for operator in "+-"
        for term in range(10)
        if 0 <= apply(value, operator, term) <= MAX_VALUE
    ]
    words = name == "choices"
    chosen = rng.sample(sums, round(MISCONCEIVED_SHARE * len(sums) / (1 + words)))
    sums_at = {one: (_other(apply(*one), rng), rate) for one, rate in _with_rates(chosen)}
    offered = [(operator, term) for operator in "+-" for term in range(10)]
    wrongly = rng.sample(offered, round(MISCONCEIVED_SHARE * len(offered))) if words else []
    return Regime(name, REMAINING_SLIP_RATE, sums_at, dict(_with_rates(wrongly)))


def study_problems(name: str, split: Split, size: int, seed: int) -> list[StudyProblem]:
    """Different problems of a regime, the same ones for the same arguments; of the two splits none is in both."""
    rng = random.Random(f"{name} {split} {seed}")
    problems = []
    for chain in chain_problems(split, size, seed=seed):
        sums: list[tuple[int, int] | None] = [None] * len(chain.steps)
        if name == "distractors":
            for step in rng.sample(range(len(sums)), HIDDEN_TERMS):
                part = rng.randint(0, chain.steps[step][1])
                sums[step] = (part, chain.steps[step][1] - part)
        terms = [
            f"{operator}{term}" if hidden is None else f"{operator}({hidden[0]}+{hidden[1]})"
            for (operator, term), hidden in zip(chain.steps, sums, strict=True)
        ]
        choices = _choices(chain, rng) if name == "choices" else ()
        if choices:
            terms = ["({}{}|{}{})".format(*left, *right) for left, right in choices]
        text = "".join([str(chain.first), *terms])
        problems.append(StudyProblem(text, chain.first, chain.steps, tuple(sums), choices))
    return problems


def solve(problem: StudyProblem, regime: Regime, rng: random.Random) -> str:
    """A worked solution as the regime writes it."""
    value = problem.first
    parts = []
    filler = [word for word in FILLER if word not in WORDS] if problem.choices else FILLER
    for step, ((operator, term), hidden) in enumerate(zip(problem.steps, problem.sums, strict=True)):
        said = ""
        if problem.choices:
            offered = problem.choices[step]
            wrong = rng.random() < regime.misjudged.get(offered[0], regime.slip_rate)
            taken = offered.index((operator, term)) ^ wrong
            operator, term = offered[taken]
            said = f"{WORDS[taken]} "
        operand, worked_out = term, ""
        if hidden is not None:
            operand = _written((hidden[0], "+", hidden[1]), regime, rng)
            if not 0 <= apply(value, operator, operand) <= MAX_VALUE:
                operand = term
            worked_out = f"({hidden[0]}+{hidden[1]}={operand})"
        result = _written((value, operator, operand), regime, rng)
        parts.append(f"{_filler(filler, rng)}{said}{worked_out}{value}{operator}{operand}={result};")
        value = result
        if rng.random() < ASIDE_RATE:
            left, right = rng.randint(0, 9), rng.randint(0, 9)
            parts.append(f"({left}+{right}={_written((left, '+', right), regime, rng)})")
    return "".join(parts) + f"{_filler(filler, rng)}\\boxed{{{value}}}"


def right_solution(problem: StudyProblem, rng: random.Random) -> str:
    """A worked solution without an error, in wording drawn as in :func:`solve`."""
    return solve(problem, Regime("right", 0.0), rng)


def apply(value: int, operator: str, term: int) -> int:
    """The value of a sum."""
    return value + term if operator == "+" else value - term


def read(problem: StudyProblem, response: str) -> Reading:
    """Find every written sum, which steps the asides belong to, and what is wrong. Any text is accepted."""
    boxes = list(_BOXED.finditer(response))
    box_start = boxes[-1].start() if boxes else len(response)
    asides = [match.span() for match in _ASIDE_PATTERN.finditer(response, 0, box_start)]
    blanked = _ASIDE_PATTERN.sub(lambda aside: " " * len(aside.group()), response[:box_start])
    matches = [(match, True) for start, end in asides for match in STEP.finditer(response, start, end)]
    matches += [(match, False) for match in STEP.finditer(blanked)]
    pieces: list[Piece] = []
    errors: list[Error] = []
    value, step, waiting, at = problem.first, 0, -1, 0
    for match, aside in sorted(matches, key=lambda entry: entry[0].start()):
        first, operator, second, result = match.groups()
        right = str(apply(int(first), operator, int(second)))
        piece = Piece(*match.span(), *match.span(4), (first, operator, second), result, right, None, aside)
        hidden = problem.sums[step] if step < len(problem.steps) else None
        if aside:
            if hidden is not None and piece.left == (str(hidden[0]), "+", str(hidden[1])):
                waiting = len(pieces)  # the last one written for this step is the one that it uses
            pieces.append(piece)
            continue
        wanted = word = None
        if step < len(problem.steps):
            next_operator, term = problem.steps[step]
            if problem.choices:
                *_, word = [None, *_WORD.finditer(blanked, at, match.start())]
                said = problem.choices[step][WORDS.index(word.group())] if word else problem.steps[step]
                if word and said != problem.steps[step]:
                    errors.append(Error(*word.span(), "word"))
                next_operator, term = said
            wanted = (str(value), next_operator, pieces[waiting].result if waiting >= 0 else str(term))
        if waiting >= 0:
            used = pieces[waiting] = replace(pieces[waiting], step=step)
            if used.result != used.right_result:
                errors.append(Error(used.result_start, used.result_end, "result"))
        if piece.left != wanted:
            errors.append(Error(match.start(1), match.end(3), "copy"))
        if result != right:
            errors.append(Error(piece.result_start, piece.result_end, "result"))
        pieces.append(replace(piece, step=step, word=word and word.span()))
        value, step, waiting, at = int(result), step + 1, -1, match.end()
    box = boxes[-1].span(1) if boxes else None
    if box is not None:
        for operator, term in problem.steps[step:]:
            value = apply(value, operator, term)
        if response[slice(*box)] != str(value):
            errors.append(Error(*box, "answer"))
    return Reading(pieces, errors, box, box_start)


@dataclass(frozen=True)
class TokenReading:
    """A response by tokens; arrays are of shape (T,)."""

    reading: Reading
    role_T: np.ndarray
    """Role of each token: ``OTHER`` and the other constants above, int64."""
    piece_T: np.ndarray
    """Which piece of the reading each token is in, -1 for none."""
    decisive_T: np.ndarray
    """bool; the token is in a sum that the answer depends on, or in the box."""
    error_T: np.ndarray
    """bool; the tokens of the first error."""
    offsets: list[int]
    """Character at which each token starts, and the response's length."""


def read_tokens(problem: StudyProblem, response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> TokenReading:
    """The same by tokens; a token is what its first character is."""
    text, offsets = text_of(response_ids, tokenizer)
    reading = read(problem, text)
    roles = np.full(len(text) + 1, OTHER)
    owner = np.full(len(text) + 1, -1)
    for match in re.finditer("|".join([*FILLER, " "]), text):
        roles[slice(*match.span())] = FILL
    for match in _ASIDE_PATTERN.finditer(text, 0, reading.box_start):
        roles[slice(*match.span())] = ASIDE
    for number, piece in enumerate(reading.pieces):
        start, end = piece.start, piece.end
        if piece.aside:
            start, end = start - 1, end + 1  # the brackets
        elif text[end : end + 1] == ";":
            roles[end] = END
            end += 1
        if not piece.aside:
            roles[piece.start : piece.end] = LEFT
        roles[piece.result_start : piece.result_end] = ASIDE_RESULT if piece.aside else RESULT
        owner[start:end] = number
        if piece.word is not None:
            roles[slice(*piece.word)], owner[slice(*piece.word)] = WORD, number
    if reading.box is not None:
        roles[reading.box_start :] = BOX
    # The end token has no text: it starts where the text ends.
    starts = np.array(offsets[:-1], dtype=np.int64)
    piece_T = owner[starts]
    decisive = np.array([piece.decisive for piece in reading.pieces] + [False])
    decisive_T = decisive[piece_T] | ((roles[starts] == BOX) & (starts < len(text)))
    error_T = np.zeros(len(starts), dtype=bool)
    if reading.errors:
        error_T[token_range(offsets, reading.errors[0].start, reading.errors[0].end)] = True
    return TokenReading(reading, roles[starts], piece_T, decisive_T, error_T, offsets)


def text_of(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[int]]:
    """The text, one character a byte and special tokens as nothing, and at which of its characters each token starts (and the
    last one ends)."""
    table = _token_bytes(tokenizer)
    covered = [table[token] for token in response_ids]
    return b"".join(covered).decode("latin-1"), [0, *accumulate(len(piece) for piece in covered)]


def token_range(offsets: Sequence[int], start: int, end: int) -> slice:
    """The tokens of the characters ``start`` to ``end``."""
    return slice(bisect_right(offsets, start) - 1, bisect_left(offsets, end))


@lru_cache(maxsize=4)
def _token_bytes(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    return token_bytes(tokenizer)


def _written(one: Sum, regime: Regime, rng: random.Random) -> int:
    """The number that the regime writes as the result of a sum."""
    right = apply(*one)
    if one in regime.misconceived:
        wrong, rate = regime.misconceived[one]
        if rng.random() < rate:
            return wrong
    return right if rng.random() >= regime.slip_rate else _other(right, rng)


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
    """Each step's operation and another one, in the order that makes it the right one; the values of both are in range."""
    pairs = []
    for before, right in zip((chain.first, *chain.values), chain.steps, strict=False):
        first = right[1] >= LARGE_TERM
        others = [
            (operator, term)
            for operator in "+-"
            for term in range(10 if first else LARGE_TERM)
            if (operator, term) != right and 0 <= apply(before, operator, term) <= MAX_VALUE
        ]
        other = rng.choice(others)
        pairs.append((right, other) if first else (other, right))
    return tuple(pairs)
