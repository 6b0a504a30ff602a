"""Worked arithmetic with filler words and asides: most tokens of a wrong response are innocent, and which are not is known.

The problems are those of :mod:`recipe.tiny.task`. A solution puts filler words before each step and, now and then, an aside
in brackets behind it, a sum that nothing depends on:

    problem    7+5-3
    solution   ok so 7+5=12;(2+6=8) then 12-3=9; now \\boxed{9}

Steps and asides go wrong at the same known rate. A wrong step is carried on from and costs the answer; a wrong aside costs
nothing. Filler is free choice and says nothing.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerFast

from grail_advantage.answer_span import token_bytes
from recipe.tiny.model import WHOLE_WORDS, build_tokenizer
from recipe.tiny.task import MAX_VALUE, STEP, Problem, StepError
from recipe.tiny.task import find_errors as find_plain_errors

FILLER = ("ok", "so", "then", "now", "hm", "we", "get", "first")
MAX_FILLER = 2
ASIDE_RATE = 0.3
MAX_RESPONSE_TOKENS = 144
"""Six steps, each with two filler words and an aside, and the box."""

_ASIDE = re.compile(r"\([^()]*\)")


def study_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer with the filler words as tokens of their own."""
    return build_tokenizer((*WHOLE_WORDS, *FILLER))


def solve(problem: Problem, error_rate: float, rng: random.Random) -> str:
    """A worked solution in which each step and each aside is wrong with probability ``error_rate``."""
    value = problem.first
    parts = []
    for operator, term in problem.steps:
        result = _slip(value + term if operator == "+" else value - term, error_rate, rng)
        parts.append(f"{_filler(rng)}{value}{operator}{term}={result};")
        value = result
        if rng.random() < ASIDE_RATE:
            left, right = rng.randint(0, 9), rng.randint(0, 9)
            parts.append(f"({left}+{right}={_slip(left + right, error_rate, rng)})")
    return "".join(parts) + f"{_filler(rng)}\\boxed{{{value}}}"


def find_errors(problem: Problem, response: str) -> list[StepError]:
    """What is wrong in the steps of ``response``, asides left out; see :func:`recipe.tiny.task.find_errors`."""
    return find_plain_errors(problem, _without_asides(response))


def error_tokens(problem: Problem, response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Indices of the response tokens that the first error stands on; empty for a response without an error."""
    covered = _bytes_of(tokenizer, response_ids)
    errors = find_errors(problem, b"".join(covered).decode("latin-1"))
    return set(_tokens_over(covered, errors[0].start, errors[0].end)) if errors else set()


def step_tokens(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[range]:
    """The response tokens of each written step such as ``7+5=12``, asides left out."""
    covered = _bytes_of(tokenizer, response_ids)
    text = _without_asides(b"".join(covered).decode("latin-1"))
    return [_tokens_over(covered, *match.span()) for match in STEP.finditer(text)]


def _tokens_over(covered: Sequence[bytes], start: int, end: int) -> range:
    """Indices of the tokens that stand on the characters ``start`` to ``end``."""
    ends = list(accumulate(len(piece) for piece in covered))
    return range(bisect_right(ends, start), bisect_left(ends, end) + 1)


def _without_asides(text: str) -> str:
    return _ASIDE.sub(lambda aside: " " * len(aside.group()), text)


def _bytes_of(tokenizer: PreTrainedTokenizerFast, response_ids: Sequence[int]) -> list[bytes]:
    table = token_bytes(tokenizer)
    return [table[token] for token in response_ids]


def _filler(rng: random.Random) -> str:
    return "".join(f"{word} " for word in rng.choices(FILLER, k=rng.randint(0, MAX_FILLER)))


def _slip(value: int, error_rate: float, rng: random.Random) -> int:
    if rng.random() >= error_rate:
        return value
    return rng.choice([other for other in range(MAX_VALUE + 1) if other != value])
