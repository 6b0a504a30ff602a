r"""The patches of math-verify 0.9.0 and latex2sympy2-extended 1.11.0: where they reward wrong answers or refuse right ones.

Importing this module makes the six, in the worker's process. Each function says what the code that it replaces does, and
with that when it can go: once its examples have their verdicts without it.
"""

import math
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import grader
from sympy import Expr, Float, Symbol

# To which numbers that are not rational are compared, beyond those before the point
EXACT_DIGITS = 1000

_inherited_numeric_eq = grader.sympy_numeric_eq
_inherited_symbolic_eq = grader.sympy_symbolic_eq
_inherited_solve = grader.solve


def product(self: _Latex2Sympy, factors: list[Any], i: int = 0) -> Any:
    """``convert_postfix_list`` adds a whole number and a number after it, as in a mixed number, which does not reach it:
    ``(2)(3)`` would be 5, and not 6."""
    first = self.convert_postfix(factors[i])
    if i == len(factors) - 1 or not isinstance(first, Expr | sympy.MatrixBase | list):
        return first
    rest = product(self, factors, i + 1)
    if isinstance(first, list):
        return sympy.Derivative(rest, first[0])
    has_matrix = any(getattr(side, "is_Matrix", False) for side in (first, rest))
    if has_matrix:
        return self.mat_mul_flat(first, rest)
    return self.mul_flat(first, rest)


def numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """``sympy_numeric_eq`` compares 15 digits after the point: 1-2^-60 would be 1-2^-61, and x/2^60 would be x/2^61. Here
    numbers are compared exactly, unless one is a decimal or a percentage."""
    if any(grader.is_atomic_or_pct_atomic(side, Float) for side in (a, b)):
        try:  # not ==, by which 1 and 1.0 are different for sympy
            return bool((a.doit().round(float_rounding) - b.doit().round(float_rounding)).is_zero)
        except (AttributeError, TypeError):
            return False
    first = _exact(a)
    second = _exact(b)
    if first is not None and second is not None:
        if first.is_Rational and second.is_Rational:
            return bool(first == second)
        sizes = [abs(number).evalf(3) for number in (first, second)]
        digits = EXACT_DIGITS + max(
            [abs(magnitude(size)) for size in sizes if size.is_Float], default=0
        )
        difference = (first - second).evalf(2, maxn=digits)
        if difference.is_number and all(
            part.is_Rational or part.is_Float for part in difference.as_real_imag()
        ):
            return all(map(_is_nothing, difference.as_real_imag()))
    elif (
        isinstance(a, Expr)
        and isinstance(b, Expr)
        and a.free_symbols | b.free_symbols
        and not (a - b).has(Float)
    ):
        return False  # math-verify goes on to simplify the difference
    return bool(_inherited_numeric_eq(a, b, float_rounding, numeric_precision))


def symbolic_eq(a: Any, b: Any) -> bool:
    """``sympy_symbolic_eq`` simplifies the difference of two numbers that :func:`numeric_eq` called different, which takes
    long: 2^100000 and 2^100001 would have no verdict."""
    return (_exact(a) is None or _exact(b) is None) and bool(_inherited_symbolic_eq(a, b))


def compare_symbols(a: Any, b: Any) -> bool:
    """``sympy_compare_symbols`` compares texts without capitals: ``\\delta`` would be ``\\Delta``, ``e`` would be ``E``, and
    ``x+0`` would not be ``x``."""
    if isinstance(a, Symbol) and isinstance(b, Symbol):
        return bool(a.name == b.name)
    return symbolic_eq(a, b)


def solve(*equation: Any) -> Any:
    """Equations are equal if their solutions are: dy/dx=2x and dy/dx=3x, which ``solve`` has no solution for, would be."""
    solutions = _inherited_solve(*equation)
    if not solutions:
        raise ValueError("no solution")
    return solutions


def magnitude(size: Float) -> int:
    """Returns the power of ten of a number's first digit, or one less; ``math.log10`` would underflow."""
    # mpmath's last two are exponent and bits: a number is below 2 ** (exponent + bits), and half of it at least.
    return math.floor(math.log10(2) * sum(size._mpf_[2:]))


def _is_nothing(part: Any) -> bool:
    """Returns whether a part of a difference is 0, known to no digit, or below :data:`EXACT_DIGITS`, where rounding
    is."""
    return bool(
        part == 0 or (part.is_Float and (part._prec == 1 or magnitude(part) < -EXACT_DIGITS))
    )


def _exact(number: Any) -> Any:
    """Returns a number without decimals, evaluated; None for another expression, and for one that only a method
    evaluates."""
    methods = sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative
    if not isinstance(number, Expr) or not number.is_number or number.has(*methods):
        return None
    # By its digits: 0.1 is 1/10, and not the binary number next to it.
    return number.xreplace(
        {decimal: sympy.Rational(str(decimal)) for decimal in number.atoms(Float)}
    ).doit()


_Latex2Sympy.convert_postfix_list = product
# It has no entry, so that `x\ne 2` and `2\ne x` would raise KeyError
grader.INVERSE_RELATIONS[sympy.Ne] = sympy.Ne
grader.sympy_numeric_eq = numeric_eq
grader.sympy_symbolic_eq = symbolic_eq
grader.sympy_compare_symbols = compare_symbols
grader.solve = solve
