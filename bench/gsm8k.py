"""Places on real text: GSM8K's own solutions with one intermediate result changed, and its consequences, for SmolLM2.

GSM8K marks every calculation, as in ``48/2=<<48/2=24>>24``. One result is changed by a few units of a digit, and every later
calculation that uses it is worked out again, up to the answer: the first wrong token is known. A changed result is recognised
by its value; solutions where that is not certain are left out. Each changed solution and its original are a group.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.policy import Label, SampledBatch, assemble
from bench.task import OTHER, RESULT
from grail_advantage.batch import Example
from verl_cpu.tiny.smollm2 import load_smollm2

SUFFIX = " Please reason step by step, and put your final answer within \\boxed{}."
LONGEST = 256
"""Tokens of prompt and response; longer problems are left out."""
COMMON = frozenset(map(Fraction, (0, 1, 2, 4, 5, 7, 10, 12, 20, 24, 30, 50, 52, 60, 100, 365, 1000)))
"""Values that a line may bring in by itself, such as the days of a week."""

_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)|(?<![\d.,])\.\d+")
_UNMARKED = re.compile(r"=\s*[$€£]?\s*\d(?![^<]*>>)")
_OPERATIONS: dict[type, Callable] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


class CannotEditError(ValueError):
    """No result of the solution can be changed with certainty."""


class Edit(NamedTuple):
    """A solution with one changed result, and the one that it was made of."""

    lines: list[str]
    answer: str
    original_lines: list[str]
    original_answer: str
    line: int
    """The changed one."""


class _Calculation(NamedTuple):
    line: int
    expression: str
    value: Fraction
    start: int
    shown: str


def edit(question: str, solution: str, seed: str) -> Edit:
    """Change one result of a solution and all that depends on it, drawn by the seed; CannotEditError where none is certain."""
    *lines, final = [line.strip() for line in solution.strip().splitlines() if line.strip()]
    answer = final.removeprefix("####").strip()
    if not final.startswith("####") or not _NUMBER.fullmatch(answer) or len(lines) < 2:
        raise CannotEditError
    calculations = []
    for number, line in enumerate(lines):
        for match in _ANNOTATION.finditer(line):
            shown, value = _NUMBER.match(line, match.end()), evaluate(match[1])
            if shown is None or [value, value] != [*_values(shown[0]), *_values(match[2])]:
                raise CannotEditError
            calculations.append(_Calculation(number, match[1], value, match.start(), shown[0]))
    generator = random.Random(seed)
    for index in generator.sample(range(len(calculations)), len(calculations)):
        for value in _slips(calculations[index], generator):
            try:
                edited, new_answer = _carried_on(set(_values(question)), lines, answer, calculations[index:], value)
            except CannotEditError:
                continue
            plain = [[_ANNOTATION.sub("", line) for line in version] for version in (edited, lines)]
            return Edit(plain[0], new_answer, plain[1], answer, calculations[index].line)
    raise CannotEditError


def _slips(calculation: _Calculation, generator: random.Random) -> list[Fraction]:
    """Values that differ from a result in about one digit, and have as many, in random order."""
    whole, _, decimals = calculation.shown.replace(",", "").partition(".")
    places = range(-len(decimals), len(whole))
    changes = [sign * size * Fraction(10) ** place for place in places for size in (1, 2, 3) for sign in (1, -1)]
    values = [calculation.value + change for change in changes]
    same = [
        value for value in values if value > 0 and len(_written(calculation.shown, value)) == len(calculation.shown)
    ]
    return generator.sample(same, len(same))


def _carried_on(
    asked: set[Fraction], lines: list[str], answer: str, calculations: list[_Calculation], changed_to: Fraction
) -> tuple[list[str], str]:
    """The lines and the answer with the first of these results changed."""
    slip = calculations[0]
    changed: dict[Fraction, Fraction] = {}

    def change(one: _Calculation, value: Fraction) -> None:
        before = [*lines[: one.line], lines[one.line][: one.start], one.expression]
        if one.value in asked.union(*map(_values, before)):
            raise CannotEditError  # an earlier number has this value
        changed[one.value] = value

    if changed_to in asked.union(*map(_values, lines)):
        raise CannotEditError
    change(slip, changed_to)
    for later in calculations[1:]:
        expression = _replaced(later.expression, changed)
        if expression == later.expression:
            if later.value in changed:
                raise CannotEditError  # two results with one value
            continue
        value = evaluate(expression)
        if slip.value in COMMON or changed.get(later.value, value) != value:
            raise CannotEditError
        if later.value not in changed:
            change(later, value)
    if _values(answer)[0] not in changed:
        raise CannotEditError  # it does not depend on the result
    for number in range(slip.line, len(lines)):
        text = _ANNOTATION.sub("", lines[number])
        explained = [*lines[:number], *(match[0] for match in _ANNOTATION.finditer(lines[number]))]
        known = asked.union(COMMON, *map(_values, explained))
        if changed.keys() & set(_values(text)) and (set(_values(text)) - known or _UNMARKED.search(lines[number])):
            raise CannotEditError  # a calculation without annotation
    edited = list(lines[: slip.line])
    for number in range(slip.line, len(lines)):
        kept = slip.start + len("<<") + len(slip.expression) if number == slip.line else 0
        edited.append(lines[number][:kept] + _replaced(lines[number][kept:], changed))
    return edited, _replaced(answer, changed)


def _replaced(text: str, changed: dict[Fraction, Fraction]) -> str:
    def replace(match: re.Match[str]) -> str:
        value = Fraction(match[0].replace(",", ""))
        return _written(match[0], changed[value]) if value in changed else match[0]

    return _NUMBER.sub(replace, text)


def _written(like: str, value: Fraction) -> str:
    """A value with as many decimals as another number, and thousands separators where that has them."""
    whole, point, decimals = like.partition(".")
    scaled = value * 10 ** len(decimals)
    if value <= 0 or scaled.denominator != 1:
        raise CannotEditError
    digits = str(scaled.numerator).rjust(len(decimals) + 1, "0")
    new_whole, new_decimals = digits[: len(digits) - len(decimals)], digits[len(digits) - len(decimals) :]
    if not whole:
        new_whole = new_whole.lstrip("0")
    return (f"{int(new_whole):,}" if "," in whole else new_whole) + point + new_decimals


def _values(text: str) -> list[Fraction]:
    return [Fraction(match[0].replace(",", "")) for match in _NUMBER.finditer(text)]


def evaluate(expression: str) -> Fraction:
    """The exact value of numbers, ``+ - * /`` and parentheses; CannotEditError for anything else."""
    text = expression.replace(",", "").strip()

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(text, node) or "")
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError

    try:
        return value(ast.parse(text, mode="eval").body) if len(text) < 200 else _values("")[0]
    except (ValueError, SyntaxError, KeyError, ZeroDivisionError, IndexError, RecursionError, MemoryError) as error:
        raise CannotEditError from error


def prepare(path: Path, count: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, SampledBatch, int]:
    """SmolLM2, a batch of ``count`` changed solutions, drawn at random, each beside its original, and their number; ValueError
    where SmolLM2 is not installed, or the file has no such solution."""
    model, tokenizer = load_smollm2()
    prompts, responses, examples, labels = [], [], [], []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    for number in random.Random(0).sample(range(len(records)), len(records)):
        record = records[number]
        try:
            changed = edit(record["question"], record["answer"], f"0/{number + 1}")
        except CannotEditError:
            continue
        messages = [{"role": "user", "content": record["question"] + SUFFIX}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        pair = [(changed.lines, changed.answer), (changed.original_lines, changed.original_answer)]
        texts = ["\n".join([*lines, f"The final answer is \\boxed{{{answer}}}."]) for lines, answer in pair]
        encoded = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
        if len(prompt) + max(len(one["input_ids"]) for one in encoded) >= LONGEST:
            continue
        labels += [label_of(texts, [one["input_ids"] for one in encoded], encoded[0]["offset_mapping"], changed), None]
        prompts += [prompt, prompt]
        responses += [[*one["input_ids"], tokenizer.eos_token_id] for one in encoded]
        example = Example(messages, {"reward_model": {"ground_truth": changed.original_answer}}, {})
        examples += [example, example]
        if len(labels) == 2 * count:
            break
    if not labels:
        raise ValueError(f"{path}: no solution can be changed; it should hold GSM8K's question and answer a line")
    kinds = [label.alike_T if label else np.zeros(len(r), bool) for label, r in zip(labels, responses, strict=True)]
    fields = {
        "bench_first_wrong": [label and label.token for label in labels],
        "bench_kinds": [np.where(kind_T, RESULT, OTHER) for kind_T in kinds],
    }
    rewards, exact = [0.0, 1.0] * (len(labels) // 2), [None] * len(labels)
    batch = assemble(model, tokenizer, prompts, responses, rewards, 2, examples, labels, [*exact], fields)
    return model.eval(), tokenizer, batch, len(labels) // 2


def label_of(texts: list[str], ids: list[list[int]], offsets: list[tuple[int, int]], changed: Edit) -> Label:
    """The first error of a changed solution: where it departs from the original. Its kind: tokens with a digit."""
    length = len(ids[0]) + 1  # the end token
    token = next(place for place, (own, right) in enumerate(zip(*ids, strict=False)) if own != right)
    start = sum(len(line) + 1 for line in changed.lines[: changed.line])
    end = start + len(changed.lines[changed.line])
    step_T, alike_T = np.zeros(length, dtype=bool), np.zeros(length, dtype=bool)
    for place, (first, past) in enumerate(offsets):
        step_T[place] = start <= first < end
        alike_T[place] = any(character.isdigit() for character in texts[0][first:past])
    return Label(token, step_T, alike_T)
