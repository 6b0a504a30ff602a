"""Worked solutions with one wrong result: GSM8K's own, with one intermediate result and its consequences changed.

GSM8K marks every calculation, as in ``48/2=<<48/2=24>>24``. So a result can be changed, and all later calculations that use it
worked out again: the text after the slip is consistent with it, as after a single error of reasoning. The wrong step is
known exactly.

A number in a text has no name: a changed result is recognised by its value. Solutions where that is not certain are left out,
as where a number of the question, or an earlier one, has the same value.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)|(?<![\d.,])\.\d+")
_UNMARKED = re.compile(r"=\s*[$€£]?\s*\d(?![^<]*>>)")
"""An equals sign in front of a number, outside annotations."""
_FINAL = re.compile(r"^####\s*(.*?)\s*$")
_COMMON = frozenset(map(Fraction, (0, 1, 2, 4, 5, 7, 10, 12, 20, 24, 30, 50, 52, 60, 100, 365, 1000)))
"""Values that a later line may bring in by itself, such as the days of a week; a result that is used later is none of them."""
_MAX_EXPRESSION = 200


class CannotEditError(ValueError):
    """A solution that no result of can be changed; the message is the reason."""


@dataclass(frozen=True)
class Step:
    """A line of a solution."""

    text: str
    """Without the annotations."""
    results: Sequence[tuple[int, int]]
    """Results of its calculations in the text, half-open ranges of characters."""


@dataclass(frozen=True)
class EditedSolution:
    """A solution with one wrong result, and the original."""

    steps: Sequence[Step]
    answer: str
    original_steps: Sequence[Step]
    original_answer: str
    wrong_step: int
    """Index of the step whose result was changed."""
    wrong_result: int
    """Index of the changed result within its step."""
    annotated: Sequence[str]
    """The edited lines with their annotations, of which exactly one does not hold."""


@dataclass(frozen=True)
class _Calculation:
    line: int
    expression: str
    value: Fraction
    start: int
    """Of the annotation, in the annotated line."""
    shown: tuple[int, int]
    """The result after it, in the annotated line."""


def parse_solution(answer: str) -> tuple[list[str], str]:
    """The lines of a GSM8K answer, annotations included, and the text after ``####``.

    Raises:
        CannotEditError: there is no ``####``.
    """
    lines = [line.strip() for line in answer.strip().splitlines() if line.strip()]
    final = _FINAL.match(lines[-1]) if lines else None
    if final is None:
        raise CannotEditError("no final answer")
    return lines[:-1], final[1]


def plain_step(annotated: str) -> Step:
    """A line without its annotations."""
    text, results, at = "", [], 0
    for match in _ANNOTATION.finditer(annotated):
        text += annotated[at : match.start()]
        at = match.end()
        shown = _NUMBER.match(annotated, at)
        if shown is not None:
            results.append((len(text), len(text) + len(shown[0])))
    return Step(text + annotated[at:], results)


def edit_solution(question: str, answer: str, seed: str) -> EditedSolution:
    """Change one result of a GSM8K solution and all results that depend on it.

    Which result, and to what, is drawn evenly among those that can be changed; the number of its digits stays.

    Args:
        question: the problem.
        answer: GSM8K's answer, with annotations and ``#### ANSWER``.
        seed: of the draw; the same seed gives the same edit.

    Raises:
        CannotEditError: with the reason.
    """
    lines, final = parse_solution(answer)
    if len(lines) < 2:
        raise CannotEditError("fewer than two steps")
    calculations = _calculations(lines)
    if not calculations:
        raise CannotEditError("no calculation")
    if _NUMBER.fullmatch(final) is None:
        raise CannotEditError("the final answer is no plain number")
    generator = random.Random(seed)
    asked = set(_values(question))
    reasons = []
    for index in generator.sample(range(len(calculations)), len(calculations)):
        for changed in _slips(lines, calculations[index], generator):
            try:
                edited, new_final = _carry_on(asked, lines, final, calculations, index, changed)
            except CannotEditError as reason:
                reasons.append(str(reason))
                continue
            here = calculations[index]
            before = [other for other in calculations[:index] if other.line == here.line]
            return EditedSolution(
                steps=[plain_step(line) for line in edited],
                answer=new_final,
                original_steps=[plain_step(line) for line in lines],
                original_answer=final,
                wrong_step=here.line,
                wrong_result=len(before),
                annotated=edited,
            )
    raise CannotEditError(reasons[0] if reasons else "no result can take another value")


def _calculations(lines: Sequence[str]) -> list[_Calculation]:
    calculations = []
    for number, line in enumerate(lines):
        for match in _ANNOTATION.finditer(line):
            shown = _NUMBER.match(line, match.end())
            value = evaluate(match[1])
            if shown is None or value != _value(shown[0]) or [value] != _values(match[2]):
                raise CannotEditError("a calculation that does not hold as written")
            calculations.append(_Calculation(number, match[1], value, match.start(), shown.span()))
    return calculations


def _slips(lines: Sequence[str], calculation: _Calculation, generator: random.Random) -> list[Fraction]:
    """Values that differ from a result in about one digit, in random order."""
    shown = lines[calculation.line][slice(*calculation.shown)]
    whole, _, decimals = shown.replace(",", "").partition(".")
    changes = [
        sign * size * Fraction(10) ** place
        for place in range(-len(decimals), len(whole))
        for size in (1, 2, 3)
        for sign in (1, -1)
    ]
    values = [calculation.value + change for change in changes]
    same_width = [value for value in values if value > 0 and len(_written(shown, value)) == len(shown)]
    return generator.sample(same_width, len(same_width))


def _carry_on(
    asked: set[Fraction],
    lines: Sequence[str],
    final: str,
    calculations: Sequence[_Calculation],
    index: int,
    changed_to: Fraction,
) -> tuple[list[str], str]:
    """The lines and the final answer with the result of one calculation changed."""
    slip = calculations[index]
    everywhere = asked.union(*(_values(line) for line in lines))
    if changed_to in everywhere:
        raise CannotEditError("no value that stands nowhere else")
    changed = {slip.value: changed_to}
    _check_name(slip, asked, lines)
    carried = False
    for later in calculations[index + 1 :]:
        expression = _replaced(later.expression, changed)
        if expression == later.expression:
            if later.value in changed:
                raise CannotEditError("two results with one value")
            continue
        carried = True
        value = evaluate(expression)
        if changed.get(later.value, value) != value:
            raise CannotEditError("two results with one value")
        if later.value not in changed:
            _check_name(later, asked, lines)
            changed[later.value] = value
    if carried and slip.value in _COMMON:
        raise CannotEditError("a result with the value of a common constant")
    if _value(final) not in changed:
        raise CannotEditError("the final answer does not depend on it")
    for number in range(slip.line, len(lines)):
        _check_explained(asked.union(*(_values(line) for line in lines[:number])), lines[number], changed)

    edited = []
    for number, line in enumerate(lines):
        if number < slip.line:
            edited.append(line)
            continue
        # Of the step itself, the text before the changed result stays; the annotation's own result is changed.
        kept = slip.start + len("<<") + len(slip.expression) if number == slip.line else 0
        edited.append(line[:kept] + _replaced(line[kept:], changed))
    return edited, _replaced(final, changed)


def _check_name(calculation: _Calculation, asked: set[Fraction], lines: Sequence[str]) -> None:
    """Refuse a result whose value an earlier number has: it could not be recognised by its value."""
    before = [*lines[: calculation.line], lines[calculation.line][: calculation.start]]
    expression = _values(calculation.expression)
    if calculation.value in asked.union(expression, *(_values(line) for line in before)):
        raise CannotEditError("a result whose value stands before it")


def _check_explained(known: set[Fraction], line: str, changed: dict[Fraction, Fraction]) -> None:
    """Of a line with a changed number, every new number must come from a calculation that can be worked out again."""
    text = _ANNOTATION.sub("", line)
    if not changed.keys() & set(_values(text)):
        return
    calculated = [value for match in _ANNOTATION.finditer(line) for value in _values(match[0])]
    if set(_values(text)) - known - _COMMON - set(calculated) or _UNMARKED.search(line):
        raise CannotEditError("a calculation without annotation")


def _replaced(text: str, changed: dict[Fraction, Fraction]) -> str:
    def replace(match: re.Match[str]) -> str:
        value = _value(match[0])
        return _written(match[0], changed[value]) if value in changed else match[0]

    return _NUMBER.sub(replace, text)


def _written(like: str, value: Fraction) -> str:
    """A value with as many decimals as another number, and thousands separators where that has them.

    Raises:
        CannotEditError: it has more decimals, or is not above 0.
    """
    whole, point, decimals = like.partition(".")
    scaled = value * 10 ** len(decimals)
    if value <= 0 or scaled.denominator != 1:
        raise CannotEditError("a later result that is no such number any more")
    digits = str(scaled.numerator).rjust(len(decimals) + 1, "0")
    new_whole, new_decimals = digits[: len(digits) - len(decimals)], digits[len(digits) - len(decimals) :]
    if not whole:
        new_whole = new_whole.lstrip("0")
    return (f"{int(new_whole):,}" if "," in whole else new_whole) + point + new_decimals


def _values(text: str) -> list[Fraction]:
    return [_value(match[0]) for match in _NUMBER.finditer(text)]


def _value(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def evaluate(expression: str) -> Fraction:
    """The exact value of a calculation of numbers, ``+ - * /`` and parentheses.

    Raises:
        CannotEditError: anything else.
    """
    text = expression.strip()
    try:
        if len(text) > _MAX_EXPRESSION:
            raise ValueError
        return _evaluate(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise CannotEditError("a calculation that is not plain arithmetic") from error


def _evaluate(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, text)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, text), _evaluate(node.right, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError
