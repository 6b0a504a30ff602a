"""Chains of one-digit additions and subtractions, and their worked solutions.

    problem    7+5-3                        (the task chain_sum of reasoning-gym)
    solution   7+5=12;12-3=9;\\boxed{9}

Solutions are written with incorrect steps at a known rate, and the next step starts from the incorrect result. A model
trained on them knows the sums but slips when it samples, which reinforcement learning can correct.
"""

import importlib.util
import random
import re
import sys
import types
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self

Split = Literal["train", "validation"]

_PROBLEM = re.compile(r"\d(?:[+-]\d)+", re.ASCII)
SHORT = "{left}={result};"
LONG = "{left}={result}, so we have {result} by now;"
"""Wordings of a step; with the longer one a solution has 87 to 186 tokens, 125 on average."""
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# One text in so many, chosen by its own hash, is held out: the splits are disjoint for every seed and size.
_VALIDATION_SHARE = 8
MIN_STEPS = 3
MAX_STEPS = 6
# Running values stay in 0..MAX_VALUE, so that about 300 different sums make up the whole task.
MAX_VALUE = 19
# reasoning-gym draws item i from random.Random(seed + i): seeds this far apart share no items.
_SEED_STRIDE = 1_000_000_007


@dataclass(frozen=True)
class Problem:
    """A chain such as ``7+5-3``: its first number, then ``(operator, term)`` pairs."""

    text: str
    first: int
    steps: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a chain of one-digit terms without spaces; ValueError for any other text."""
        if not _PROBLEM.fullmatch(text):
            raise ValueError(f"problem {text!r} is not a chain of one-digit terms such as '7+5-3'")
        steps = tuple((text[i], int(text[i + 1])) for i in range(1, len(text), 2))
        return cls(text=text, first=int(text[0]), steps=steps)

    @property
    def values(self) -> tuple[int, ...]:
        """Returns the running value after each step."""
        return tuple(
            accumulate(self.steps, lambda value, step: _apply(value, *step), initial=self.first)
        )[1:]

    @property
    def stays_in_range(self) -> bool:
        return min(self.values) >= 0 and max(self.values) <= MAX_VALUE

    @property
    def answer(self) -> int:
        return self.values[-1]


def problems(split: Split, size: int, *, seed: int = 0) -> list[Problem]:
    """``size`` different problems of one split, with 3 to 6 steps, the same ones for the same arguments; ValueError
    when the split has fewer."""
    # reasoning-gym imports it for a puzzle that is not made here. It has no wheel, so a machine without a compiler
    # lacks it.
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    import reasoning_gym  # imported here: only problem generation needs it, and it is slow to import

    dataset = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=MIN_STEPS + 1,
        max_terms=MAX_STEPS + 1,
        min_digits=1,
        max_digits=1,
        # Many more than are needed: draws are of the other split, repeat themselves, or leave the range.
        size=100 * _VALIDATION_SHARE * size + 10_000,
        seed=seed * _SEED_STRIDE,
    )
    chosen: dict[str, Problem] = {}
    for item in dataset:
        text = item["metadata"]["expression"].replace(" ", "")
        problem = Problem.parse(text)
        held_out = zlib.crc32(text.encode()) % _VALIDATION_SHARE == 0
        if held_out == (split == "validation") and problem.stays_in_range:
            chosen[text] = problem
            if len(chosen) == size:
                return list(chosen.values())
    raise ValueError(
        f"size={size}: only {len(chosen)} different {split} problems exist; ask for fewer"
    )


def random_problems(
    size: int, *, seed: int = 0, steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS)
) -> list[Problem]:
    """Returns the same without ``reasoning-gym``, with so many steps at least and at most."""
    rng = random.Random(seed)
    chosen: dict[str, Problem] = {}
    while len(chosen) < size:
        terms = (f"{rng.choice('+-')}{rng.randrange(10)}" for _ in range(rng.randint(*steps)))
        problem = Problem.parse(f"{rng.randrange(10)}{''.join(terms)}")
        if problem.stays_in_range:
            chosen[problem.text] = problem
    return list(chosen.values())


def solve(
    problem: Problem,
    error_rate: float,
    rng: random.Random,
    wording: str = SHORT,
    no_carry_rate: float = 0.0,
) -> str:
    """A worked solution in which each step is incorrect with probability ``error_rate``; the next starts from its
    result. An incorrect result is any other number from 0 to ``MAX_VALUE``, all equally probable, whatever the sum.
    A sum that passes ten is written without its ten, as 7+5=2, with probability ``no_carry_rate``. ``wording`` says a
    step."""
    value = problem.first
    parts = []
    for operator, term in problem.steps:
        result = _apply(value, operator, term)
        # Nothing is drawn where the rate is 0, so that the shipped models' solutions stay what they were.
        if no_carry_rate and value < 10 <= result and rng.random() < no_carry_rate:
            result -= 10
        elif rng.random() < error_rate:
            result = rng.choice([value for value in range(MAX_VALUE + 1) if value != result])
        parts.append(wording.format(left=f"{value}{operator}{term}", result=result))
        value = result
    return "".join(parts) + f"\\boxed{{{value}}}"


def boxed_answer(response: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{...}``, or None."""
    boxes = _BOXED.findall(response)
    return boxes[-1] if boxes else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **_: object
) -> float:
    """Reward function for verl: 1 where the last complete box holds the answer, else 0."""
    return float(boxed_answer(solution_str) == ground_truth)


def _apply(value: int, operator: str, term: int) -> int:
    return value + term if operator == "+" else value - term
