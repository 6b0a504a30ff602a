"""Random answers, spelt in many ways and changed in one place; their values are exact, and no judge computes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from grail_advantage import reward
from grail_advantage.reward._normal import RULES, normal

pytestmark = pytest.mark.slow

PRIME = 1_000_000_009
UNIT = next(root for a in range(2, 99) if (root := pow(a, (PRIME - 1) // 4, PRIME)) ** 2 % PRIME == PRIME - 1)
"""A number whose square is -1, modulo the prime."""
POINTS = [{"x": 123_456_789, "y": 987_654_321, "i": unit} for unit in (UNIT, -UNIT)]
Tree = list[Any]
"""``["n", number]``, a letter, or an operation on one or two trees, and the number of a quotient or a power."""


def grown(rng: random.Random, depth: int, letters: str) -> Tree:
    kind = rng.choice("+-*/^") if depth else rng.choice("n" + letters)
    if kind in "n" + letters:
        return [kind, rng.randint(2, 99)]
    parts = [grown(rng, depth - 1, letters) for _ in range(1 + (kind in "+-*"))]
    return [kind, *parts, rng.choice((2, 3) if kind == "^" else (2, 3, 4, 5, 7, 8, 16))]


def _at(tree: Tree, point: dict[str, int]) -> int:
    kind, *parts, number = tree
    if kind in "nxyi":
        return number if kind == "n" else point[kind]
    first, last = _at(parts[0], point), _at(parts[-1], point)
    results = {"+": first + last, "-": first - last, "*": first * last, "/": first * pow(number, -1, PRIME)}
    return (results | {"^": pow(first, number, PRIME)})[kind] % PRIME


def change(tree: Tree, rng: random.Random) -> None:
    """Change a number, a letter or an operation."""
    kind, *parts, _ = tree
    if parts and rng.random() < 0.7:
        change(rng.choice(parts), rng)
    elif kind in "n/^":
        tree[-1] += rng.choice((1, 10)) if kind == "n" else 1
    else:
        tree[0] = {"+": "-", "-": "+", "x": "y", "y": "x", "*": "+", "i": "n"}[kind]


PLAIN = {"x": "x", "y": "y", "i": "i", "(": "(", ")": ")", "/": "\\frac{{{0}}}{{{1}}}", "*": " \\cdot ", "-": "-"}
STYLES: list[tuple[dict[str, str], Callable[[str], str]]] = [
    ({}, lambda text: text),
    ({"/": "\\dfrac{{{0}}}{{{1}}}", "*": " \\times "}, lambda text: f"${text}$"),
    ({"/": "{0}/{1}", "*": " * "}, lambda text: f" {text} ."),
    ({"(": "\\left(", ")": "\\right)", "*": ""}, lambda text: f"\\displaystyle {text}"),
    ({"-": "\u2212", "/": "\\tfrac{{{0}}}{{{1}}}"}, lambda text: f"\\[{text}\\]"),
    ({"(": "\\bigl(", ")": "\\bigr)", "i": "\\mathrm{i}"}, lambda text: f"\\boxed{{{text}}}"),
    ({"*": "\\,\\cdot\\,", "x": "{x}"}, lambda text: f"\\boldsymbol{{{text}}}"),
    ({"/": "\\frac{{{0}}}{{{1}}}", "i": "\\text{i}"}, lambda text: f"{text}\\text{{ cm}}"),
    ({"*": "\u00b7", "y": "\\mathit{y}"}, lambda text: f"z = {text}"),
    ({"(": "{(", ")": ")}"}, lambda text: f"\\color{{red}}{{{text}}}"),
]


def latex(tree: Tree, style: dict[str, str]) -> str:
    kind, *parts, number = tree
    if kind in "nxyi":
        return str(number) if kind == "n" else style[kind]
    texts = [latex(part, style) for part in parts]
    first, last = (f"{style['(']}{text}{style[')']}" for text in (texts[0], texts[-1]))
    if kind == "/":
        return style["/"].format(texts[0] if "frac" in style["/"] else first, number)
    return {"^": f"{first}^{{{number}}}", "*": f"{first}{style['*']}{last}"}.get(
        kind, f"{first} {style.get(kind, kind)} {last}"
    )


def spelt(tree: Tree, number: int) -> str:
    style, around = STYLES[number]
    return around(latex(tree, PLAIN | style))


def score(gold: Any, answer: str) -> float:
    return float(reward.compute_score("", f"\\boxed{{{answer}}}", gold)["score"])


@pytest.mark.parametrize("letters", ["", "x", "xy", "i"])
def test_expressions_in_ten_spellings_and_changed_in_one_place(letters: str) -> None:
    rng = random.Random(letters)
    wrong, changes = [], 0
    for _ in range(60):
        tree = grown(rng, rng.choice((1, 2)), letters)
        before, gold, number = [_at(tree, point) for point in POINTS], spelt(tree, rng.randrange(10)), rng.randrange(10)
        pairs = [(gold, spelt(tree, number), 1.0)]
        change(tree, rng)
        if [_at(tree, point) for point in POINTS] != before:
            changes += 1
            pairs.append((gold, spelt(tree, number), 0.0))
        wrong += [pair for pair in pairs if score(*pair[:2]) != pair[2]]
    assert wrong == [] and changes > 40


def numbers_of(value: Fraction, commas: str) -> list[str]:
    """Spellings of one number; ``commas`` separate thousands in one of them."""
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    whole, part = divmod(abs(value), 1)
    texts = [f"{sign}\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{value.numerator}}}{{{bottom}}}"]
    texts += [f"{value.numerator}/{bottom}", f"{sign}\\dfrac{{{2 * top}}}{{{2 * bottom}}}"]
    if whole and part:
        texts += [f"{sign}{whole}{mixed}" for mixed in (f"\\frac{{{part.numerator}}}{{{bottom}}}", f" {part}")]
    if 10**4 % bottom == 0:
        texts.append(f"{float(value):.4f}")
    if bottom in (3, 9):
        texts.append(f"{sign}{whole}.\\overline{{{int(part * 9)}}}")
    if bottom == 1:
        texts += [f"{int(value):,}".replace(",", separator) for separator in ("\\,", ",\\!", "{,}", " ", commas)]
        texts += [str(value).replace("-", "\u2212"), f"{value}.0", f"\\${value}", f"{value}\\text{{ people}}"]
    return texts


def test_numbers_lists_sets_and_tuples() -> None:
    rng = random.Random(1)
    wrong = []
    for _ in range(150):
        size = rng.choice((1, 1, 2, 3))
        values = [Fraction(rng.randint(-20000, 20000), rng.choice((1, 1, 2, 3, 8, 9, 25))) for _ in range(size)]
        other, mixed = [*values], [*values]
        other[rng.randrange(size)] += rng.choice((1, -1, Fraction(1, 2), 1000))
        opening, closing = rng.choice([("", ""), ("\\{", "\\}"), ("(", ")")])
        if opening != "(":
            rng.shuffle(mixed)
        gold, same, changed, turned = (
            opening + ", ".join(rng.choice(numbers_of(one, "{,}" if opening else ",")) for one in texts) + closing
            for texts in (values, mixed, other, values[::-1])
        )
        pairs = [(gold, same, 1.0)] + [(gold, changed, 0.0)] * (set(other) != set(values))
        pairs += [(gold, turned, 0.0)] * (opening == "(" and values != values[::-1])
        wrong += [pair for pair in pairs if score(*pair[:2]) != pair[2]]
    assert wrong == []


def test_each_rule_is_needed_for_its_example() -> None:
    for rule in RULES:
        text = example = rule[0]
        for other in RULES:
            text = text if other is rule else other[1].sub(other[2], text)
        assert " ".join(text.split()) != normal(example) == normal(normal(example)) != example, example


def test_the_normal_form_is_its_own() -> None:
    rng = random.Random(2)
    texts = [normal(spelt(grown(rng, 2, "xyi"), rng.randrange(10))) for _ in range(200)]
    assert [text for text in texts if normal(text) != text] == []
