"""Random answers, spelt in many ways and changed in one place; their values are exact fractions that no judge computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from grail_advantage import reward
from grail_advantage.reward._normal import RULES, normal

pytestmark = pytest.mark.slow

Polynomial = dict[tuple[int, int, int], Fraction]
"""Coefficients by the powers of x, y and the imaginary unit (0 or 1)."""


def add(a: Polynomial, b: Polynomial) -> Polynomial:
    return {key: value for key in {*a, *b} if (value := a.get(key, Fraction()) + b.get(key, Fraction()))}


def multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (i, j, k), p in a.items():
        for (m, n, o), q in b.items():
            product = add(product, {(i + m, j + n, (k + o) % 2): p * q * (-1) ** ((k + o) // 2)})
    return product


class Tree:
    """An expression: an integer, a letter, or an operation on two expressions."""

    def __init__(self, rng: random.Random, depth: int, letters: str) -> None:
        self.operation = rng.choice("+-*/^") if depth else rng.choice("n" + letters if letters else "n")
        self.number = rng.randint(2, 99) if self.operation == "n" else rng.choice((2, 3))
        depth = max(0, depth - 1)
        self.parts = (
            []
            if self.operation in "nxyi"
            else [Tree(rng, depth, letters) for _ in range(1 + (self.operation in "+-*"))]
        )
        self.divisor = rng.choice((2, 3, 4, 5, 7, 8, 16))

    def value(self) -> Polynomial:
        if self.operation == "n":
            return {(0, 0, 0): Fraction(self.number)}
        if self.operation in "xyi":
            return {tuple(int(letter == self.operation) for letter in "xyi"): Fraction(1)}  # type: ignore[misc]
        first = self.parts[0].value()
        if self.operation == "/":
            return multiply(first, {(0, 0, 0): Fraction(1, self.divisor)})
        if self.operation == "^":
            power = first
            for _ in range(self.number - 1):
                power = multiply(power, first)
            return power
        second = self.parts[1].value()
        return (
            multiply(first, second)
            if self.operation == "*"
            else add(first, multiply(second, {(0, 0, 0): Fraction("+-".find(self.operation) * -2 + 1)}))
        )

    def changed(self, rng: random.Random) -> None:
        """Change a number, a letter or an operation."""
        if self.parts and rng.random() < 0.7:
            rng.choice(self.parts).changed(rng)
        elif self.operation == "n":
            self.number += rng.choice((1, 10))
        elif self.operation in "+-":
            self.operation = "-+"["+-".index(self.operation)]
        elif self.operation == "/":
            self.divisor += 1
        elif self.operation == "^":
            self.number += 1
        elif self.operation in "xy":
            self.operation = "yx"["xy".index(self.operation)]
        else:
            self.operation = "n"

    def latex(self, style: dict[str, str]) -> str:
        if self.operation == "n":
            return str(self.number)
        if self.operation in "xyi":
            return style[self.operation]
        first, *rest = (part.latex(style) for part in self.parts)
        inside = f"{style['(']}{first}{style[')']}"
        if self.operation == "^":
            return f"{inside}^{{{self.number}}}"
        if self.operation == "/":
            return style["/"].format(first if "frac" in style["/"] else inside, self.divisor)
        if self.operation == "*":
            return f"{inside}{style['*']}{style['(']}{rest[0]}{style[')']}"
        return f"{inside} {self.operation.replace('-', style['-'])} {style['(']}{rest[0]}{style[')']}"


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


def spelt(tree: Tree, number: int) -> str:
    style, around = STYLES[number]
    return around(tree.latex(PLAIN | style))


def score(gold: Any, answer: str) -> float:
    return float(reward.compute_score("", f"\\boxed{{{answer}}}", gold)["score"])


@pytest.mark.parametrize("letters", ["", "x", "xy", "i"])
def test_expressions_in_ten_spellings_and_changed_in_one_place(letters: str) -> None:
    rng = random.Random(letters)
    refused, accepted, changes = [], [], 0
    for _ in range(60):
        tree = Tree(rng, rng.choice((1, 2)), letters)
        value, gold = tree.value(), spelt(tree, rng.randrange(len(STYLES)))
        number = rng.randrange(len(STYLES))
        if score(gold, spelt(tree, number)) != 1:
            refused.append((gold, spelt(tree, number)))
        tree.changed(rng)
        if tree.value() != value:
            changes += 1
            if score(gold, spelt(tree, number)) != 0:
                accepted.append((gold, spelt(tree, number)))
    assert (refused, accepted) == ([], [])
    assert changes > 40


def numbers_of(value: Fraction, commas: str) -> list[str]:
    """Spellings of one number; ``commas`` separate thousands in one of them."""
    sign, size = "-" * (value < 0), abs(value)
    whole, part = divmod(size, 1)
    texts = [
        f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
        f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
    ]
    texts += [
        f"{value.numerator}/{value.denominator}",
        f"{sign}\\dfrac{{{2 * size.numerator}}}{{{2 * size.denominator}}}",
    ]
    if whole and part:
        texts += [
            f"{sign}{whole}\\frac{{{part.numerator}}}{{{part.denominator}}}",
            f"{sign}{whole} {part.numerator}/{part.denominator}",
        ]
    if 10**4 % value.denominator == 0:
        texts.append(f"{float(value):.4f}")
    if value.denominator in (3, 9):
        texts.append(f"{sign}{whole}.\\overline{{{int(part * 9)}}}")
    if value.denominator == 1:
        texts += [f"{int(value):,}".replace(",", separator) for separator in ("\\,", ",\\!", "{,}", " ", commas)]
        texts += [str(value).replace("-", "\u2212"), f"{value}.0", f"\\${value}", f"{value}\\text{{ people}}"]
    return texts


def test_numbers_lists_sets_and_tuples() -> None:
    rng = random.Random(1)
    refused, accepted = [], []
    for _ in range(150):
        values = [
            Fraction(rng.randint(-20000, 20000), rng.choice((1, 1, 2, 3, 8, 9, 25)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        other = [*values]
        other[rng.randrange(len(values))] += rng.choice((1, -1, Fraction(1, 2), 1000))
        brackets, mixed = rng.choice([("", ""), ("\\{", "\\}"), ("(", ")")]), [*values]
        if brackets[0] != "(":
            rng.shuffle(mixed)
        gold, right, wrong = (
            brackets[0]
            + ", ".join(rng.choice(numbers_of(value, "{,}" if brackets[0] else ",")) for value in texts)
            + brackets[1]
            for texts in (values, mixed, other)
        )
        if score(gold, right) != 1:
            refused.append((gold, right))
        if set(other) != set(values) and score(gold, wrong) != 0:
            accepted.append((gold, wrong))
        if (
            brackets[0] == "("
            and len(values) > 1
            and values != values[::-1]
            and score(gold, f"({', '.join(map(str, values[::-1]))})")
        ):
            accepted.append((gold, "reversed"))
    assert (refused, accepted) == ([], [])


def test_each_rule_is_needed_for_its_example() -> None:
    for rule in RULES:
        assert normal(rule.example) == rule.result
        text = rule.example
        for other in RULES:
            text = text if other is rule else other.pattern.sub(other.replacement, text)
        assert " ".join(text.split()) != rule.result, rule.what


def test_the_normal_form_is_its_own() -> None:
    rng = random.Random(2)
    texts = [normal(spelt(Tree(rng, 2, "xyi"), rng.randrange(len(STYLES)))) for _ in range(200)]
    assert [text for text in texts if normal(text) != text] == []
