"""The process that compares answers with math-verify; ``grail_advantage.reward._verify_pool`` starts it as a script.

It loads math-verify once, forks a worker for each connection, and replaces one that takes too long or dies. A request
is the JSON list ``[gold, answer]`` (LaTeX without the box); a reply is true, false, or why there is no verdict.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import sympy
from antlr4 import InputStream
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.antlr_parser import PSLexer
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import grader, verify
from sympy import Eq, Expr, Float
from sympy.core.relational import Relational

FLOAT_DECIMALS = 6  # that two numbers must share if one is written as a decimal; math-verify's own
EXACT_DIGITS = 1000  # to which numbers that are not rational are compared, beyond those before the point
MEMORY = 1 << 30  # bytes that a worker may map beyond those that it starts with
WALL_FACTOR = 10  # wall time for each second of processor time: verdicts do not depend on how busy the machine is
CLOSED = 3  # status of a worker whose connection has no other end any more
_COMPARISONS = 5000  # of one worker, which grows by some kB with each: caches of sympy and ANTLR

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_SYMBOLS = ConversionConfig(lowercase_symbols=False)
# math-verify reads these in part: a box among others, dots, the digits of a numeral without its base, a name's letters;
# or as something else: ``n!!`` as ``(n!)!``, and the exponent ``T`` of what is no matrix as nothing.
_IN_PART = re.compile(
    r"\\(?:boxed|fbox|angle|triangle|overline|[lcdv]?dots)(?![A-Za-z])|\.\.\.|[#@?]|[0-9]\)? ?_|[0-9]'"
    r"|(?<![_^0-9.])[0-9.]+ [0-9]|! ?!|(?<!matrix\})\^ ?(?:T|\{ ?T ?\}|\{? ?\\top(?![A-Za-z]))"
)
_LETTER_I = re.compile(r"\\(?:text|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+|[iI]")
_INDEX_I = re.compile(r"_ ?(?:i|\{[^{}]*i)|(?<![A-Za-z\\])i ?(?:[=<>]|\\(?:[lg]eq?|in)(?![A-Za-z]))")


@lru_cache(maxsize=256)
def _read(text: str, with_unit: bool, is_real: bool) -> Any:
    """math-verify's reading of a whole text, None if there is none. ``math_verify.parse`` would go on to a part that it
    can read, so that ``1 \\mid 5`` states 5."""
    if _IN_PART.search(text) or not all(map(_is_whole, re.findall(r"\\[A-Za-z]+", text))):
        return None
    if with_unit:  # ``i`` as math-verify spells the imaginary unit, ``I``, and a letter ``I`` as another one
        # In braces, as the grammar drops the exponent of a bare ``I``: ``i^2`` would be ``i``.
        text = _LETTER_I.sub(lambda match: {"i": "{I}", "I": r"\iota "}.get(match[0], match[0]), text)
    try:
        text = normalize_latex(text, _NORMALIZATION)
        reading = latex2sympy(text, is_real=is_real, normalization_config=None, conversion_config=_SYMBOLS)
        return None if _contradicts_itself(reading) else reading
    except Exception:
        return None


@lru_cache(maxsize=1024)
def _is_whole(command: str) -> bool:
    """Whether the grammar does not take a command for a shorter one and letters, as ``\\pmod`` for ``\\pm od``."""
    for text in (command, command + "{x}"):
        lexer = PSLexer(InputStream(text))
        lexer.removeErrorListeners()
        if not 1 < len(lexer.nextToken().text.removesuffix("<EOF>")) < len(command):
            return True
    return False


def _contradicts_itself(reading: Any) -> bool:
    """Whether a chain of equations has two numbers more than a rounding apart, as ``x=1=5`` has."""
    if not isinstance(reading, Eq | sympy.And):
        return False
    sides = {side for equation in reading.atoms(Eq) for side in equation.args if side.is_number}
    numbers = [complex(side.evalf(5)) for side in sides] if len(sides) > 1 else []
    return any(abs(number - numbers[0]) > 0.01 * abs(numbers[0]) for number in numbers)


def _states_no_value(reading: Any) -> bool:
    """Whether an equation is more than a name and its value: ``x+y=0`` does not state 0, nor ``3x=6`` 6."""
    first = reading.args[0] if isinstance(reading, sympy.And) else reading
    side = first.lhs if isinstance(first, Eq) else None
    if not isinstance(side, Expr) or side.is_number or isinstance(side, sympy.Derivative):
        return False
    factors = (factor.base if factor.is_Pow and factor.exp == -1 else factor for factor in sympy.Mul.make_args(side))
    return any(factor.is_number or not (factor.is_Symbol or factor.is_Function) for factor in factors)


def _magnitude(size: Float) -> int:
    """The power of ten of a number's first digit, or one less; ``math.log10`` would underflow."""
    return math.floor(math.log10(2) * sum(size._mpf_[2:]))


def _is_nothing(part: Any) -> bool:
    """Whether a part of a difference is 0, known to no digit, or below :data:`EXACT_DIGITS`, where rounding is."""
    return bool(part == 0 or (part.is_Float and (part._prec == 1 or _magnitude(part) < -EXACT_DIGITS)))


def _exact(number: Any) -> Any:
    """A number without decimals, evaluated; None for another expression, and for one that only a method evaluates."""
    methods = sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative
    if not isinstance(number, Expr) or not number.is_number or number.has(*methods):
        return None
    return number.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in number.atoms(Float)}).doit()


def _numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison of numbers, exact but where one is a decimal or a percentage. Its own compares 15 digits
    after the point, so that 1-2^-60 and 1-2^-61 are equal, and x/2^60 and x/2^61."""
    if any(grader.is_atomic_or_pct_atomic(side, Float) for side in (a, b)):
        try:  # not ==, by which 1 and 1.0 are different for sympy
            return bool((a.doit().round(float_rounding) - b.doit().round(float_rounding)).is_zero)
        except (AttributeError, TypeError):
            return False
    numbers = _exact(a), _exact(b)
    if None not in numbers:
        if all(number.is_Rational for number in numbers):
            return bool(numbers[0] == numbers[1])
        sizes = [abs(number).evalf(3) for number in numbers]
        digits = EXACT_DIGITS + max([abs(_magnitude(size)) for size in sizes if size.is_Float], default=0)
        difference = (numbers[0] - numbers[1]).evalf(2, maxn=digits)
        if difference.is_number and all(part.is_Rational or part.is_Float for part in difference.as_real_imag()):
            return all(map(_is_nothing, difference.as_real_imag()))
    elif isinstance(a, Expr) and isinstance(b, Expr) and a.free_symbols | b.free_symbols and not (a - b).has(Float):
        return False  # math-verify goes on to simplify the difference
    return bool(inherited_numeric_eq(a, b, float_rounding, numeric_precision))


def _symbolic_eq(a: Any, b: Any) -> bool:
    """Numbers that differ are not simplified, which takes long."""
    return (_exact(a) is None or _exact(b) is None) and inherited_symbolic_eq(a, b)


def _solve(*equation: Any) -> Any:
    """math-verify compares the solutions of equations, by which dy/dx=2x and dy/dx=3x, with none, would be equal."""
    if not (solutions := inherited_solve(*equation)):
        raise ValueError("no solution")
    return solutions


def _compare_symbols(a: Any, b: Any) -> bool:
    """math-verify compares a lone variable as text, so that ``x+0`` would not be ``x``."""
    return bool(inherited_symbols(a, b) or _symbolic_eq(a, b))


def _product(self: _Latex2Sympy, factors: list[Any], i: int = 0) -> Any:
    """math-verify adds a whole number and a number after it, so that ``(2)(3)`` is 5. Mixed numbers do not reach it."""
    first = self.convert_postfix(factors[i])
    if i == len(factors) - 1 or not isinstance(first, Expr | sympy.MatrixBase | list):
        return first
    rest = _product(self, factors, i + 1)
    if isinstance(first, list):
        return sympy.Derivative(rest, first[0])
    multiply = self.mat_mul_flat if any(getattr(side, "is_Matrix", False) for side in (first, rest)) else self.mul_flat
    return multiply(first, rest)


grader.INVERSE_RELATIONS[sympy.Ne] = sympy.Ne
_Latex2Sympy.convert_postfix_list = _product
inherited_numeric_eq, grader.sympy_numeric_eq = grader.sympy_numeric_eq, _numeric_eq
inherited_symbolic_eq, grader.sympy_symbolic_eq = grader.sympy_symbolic_eq, _symbolic_eq
inherited_solve, grader.solve = grader.solve, _solve
inherited_symbols, grader.sympy_compare_symbols = grader.sympy_compare_symbols, _compare_symbols


def equal(gold: str, answer: str) -> bool | str:
    """Whether ``answer`` states ``gold``, or which of them math-verify cannot read."""
    texts = {"ground truth": gold, "answer": answer}
    with_unit = not any(map(_INDEX_I.search, texts.values()))
    is_real = not any("i" in _LETTER_I.findall(text) for text in texts.values())
    sides = [_read(text, with_unit, is_real) for text in texts.values()]
    if unread := [name for name, side in zip(texts, sides, strict=True) if side is None]:
        return f"math-verify cannot read the {' and the '.join(unread)}"
    if any(isinstance(side, sympy.Set) and not isinstance(side, sympy.FiniteSet) for side in sides):
        for number, text in enumerate(texts.values()):
            parts: Any = sides[number].args if isinstance(sides[number], sympy.FiniteSet) and "or" in text else [None]
            if all(isinstance(part, Relational) for part in parts):  # `x<2 or x>3` states its intervals
                sides[number] = sympy.Union(*(part.as_set() for part in parts))
    if any(map(_states_no_value, sides)) and not all(map(grader.is_relation, sides)):
        return False
    # math-verify counts decimals from the point, by which 1.6e-19 is 0.0. Small golds get three significant digits.
    size = abs(sides[0]).evalf(3) if isinstance(sides[0], Expr) and sides[0].is_number else None
    rounding = FLOAT_DECIMALS + (max(0, -_magnitude(size) - 4) if isinstance(size, Float) else 0)
    first, second = ([side] for side in sides)
    return bool(verify(first, second, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None))


def compare(gold: str, answer: str, cpu_seconds: float) -> bool | str:
    """The verdict, or why there is none. The kernel ends the process, even inside one long call into C, after that
    processor time, and after :data:`WALL_FACTOR` times that by the clock."""
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * cpu_seconds)
        return equal(gold, answer)
    except Exception as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def work(connection: Connection, cpu_seconds: float, server: int) -> NoReturn:
    """Be a worker, with bounded resources, until connection or server ends, or there were enough requests."""
    status = 1
    try:
        confine()
        if os.getppid() != server:  # it ended before this process was bound to it
            raise EOFError
        for _ in range(_COMPARISONS):
            gold, answer = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(compare(gold, answer, cpu_seconds)).encode())
        status = 0
    except (EOFError, OSError):
        status = CLOSED
    finally:
        os._exit(status)


def confine() -> None:
    """Bound the resources of this process, let it end with its parent, and let no program give it more rights."""
    for option, value in ((1, signal.SIGKILL), (38, 1)):  # PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, limit in {"AS": mapped + MEMORY, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}.items():
        with suppress(ValueError):  # lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)


def main(cpu_seconds: float, connections: list[Connection]) -> None:
    """Fork a worker for each connection, and replace each that ends; a request that it leaves gets the reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first use of math-verify loads half of sympy, which must not count against the first answer.
    for pair in (("\\frac{x}{2}", "0.5x"), ("\\sqrt{12}", "2\\sqrt{3}"), ("\\{1, 2\\}", "2, 1"), ("(0, 1]", "x=3")):
        equal(*pair)
    gc.freeze()  # a worker that looked for garbage in what they share would copy its pages
    ends = {
        -signal.SIGKILL: "killed",
        -signal.SIGPROF: f"more than {cpu_seconds:g} s of processor time",
        -signal.SIGALRM: f"no verdict within {WALL_FACTOR * cpu_seconds:g} s",
    }
    working, server = dict[int, Connection](), os.getpid()
    while True:
        for connection in set(connections) - {*working.values()}:
            if (worker := os.fork()) == 0:
                work(connection, cpu_seconds, server)
            working[worker] = connection
        worker, status = os.wait()
        connection, code = working.pop(worker), os.waitstatus_to_exitcode(status)
        if code == CLOSED:  # with the program; the other workers end with this process
            os._exit(0)
        if code != 0:
            connection.send_bytes(json.dumps(ends.get(code, f"the worker ended with status {code}")).encode())


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the program has ended
        main(float(sys.argv[1]), [Connection(int(descriptor)) for descriptor in sys.argv[2:]])
