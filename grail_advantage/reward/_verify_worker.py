"""The process that compares answers with math-verify; ``grail_advantage.reward._verify_pool`` starts it as a script.

It loads math-verify once and forks workers, which it replaces when one takes too long or dies. A request is the JSON list
``[gold, answer]`` (LaTeX without the box); a reply is true, false, or why there is no verdict. The process ends with the one
that started it, and the workers with it. Arguments: seconds of processor time for one comparison, and the descriptors of the
connections.
"""

from __future__ import annotations

import ctypes
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

from antlr4 import InputStream
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.antlr_parser import PSLexer
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import grader, verify
from sympy import (
    And,
    Derivative,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Integral,
    Limit,
    MatrixBase,
    Ne,
    Product,
    Rational,
    Set,
    Sum,
    Union,
)
from sympy.core.relational import Relational

FLOAT_DECIMALS = 6
"""Decimals that two numbers must share if one is written as a decimal; math-verify's own."""
EXACT_DIGITS = 1000
"""Digits to which numbers that are not rational are compared, beyond those before the point."""
MEMORY = 1 << 30
"""Bytes that a worker may map beyond those that it starts with."""
WALL_FACTOR = 10  # wall time for each second of processor time: verdicts do not depend on how busy the machine is
NOBODY = 65534
"""User and group of the processes where they would be root's."""
CLOSED = 3
"""Status of a worker whose connection has no other end any more."""
_COMPARISONS = 5000  # of one worker, which grows by some kB with each: caches of sympy and ANTLR

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_SYMBOLS = ConversionConfig(lowercase_symbols=False)
# math-verify reads these, but in part: a box among others, dots, the digits of a numeral without its base, a name's letters; or
# otherwise: ``n!!`` as ``(n!)!``, and the exponent ``T`` of what is no matrix as nothing.
_IN_PART = re.compile(
    r"\\(?:boxed|fbox|angle|triangle|overline|[lcdv]?dots)(?![A-Za-z])|\.\.\.|[#@?]|[0-9]\)? ?_|[0-9]'"
    r"|(?<![_^0-9.])[0-9.]+ [0-9]|! ?!|(?<!matrix\})\^ ?(?:T|\{ ?T ?\}|\{? ?\\top(?![A-Za-z]))"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER_I = re.compile(r"\\(?:text|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+|[iI]")
_INDEX_I = re.compile(r"_ ?(?:i|\{[^{}]*i)|(?<![A-Za-z\\])i ?(?:[=<>]|\\(?:[lg]eq?|in)(?![A-Za-z]))")


class Unreadable(Exception):
    """No verdict: the grammar does not cover one of the texts. The message says which."""


def _with_unit(text: str) -> str:
    """``i`` as math-verify spells the imaginary unit, ``I``, and a letter ``I`` as another one."""
    # In braces, as the grammar drops the exponent of a bare ``I``: ``i^2`` would be ``i``.
    return _LETTER_I.sub(lambda match: {"i": "{I}", "I": r"\iota "}.get(match[0], match[0]), text)


@lru_cache(maxsize=256)
def _read(text: str, with_unit: bool, is_real: bool) -> Any:
    """math-verify's reading of a whole text, None if there is none.

    ``math_verify.parse`` would go on to a part of a text that it cannot read: its last equation, its last formula, its last
    number, so that ``1 \\mid 5`` states 5.
    """
    if _IN_PART.search(text) or not all(map(_is_whole, _COMMAND.findall(text))):
        return None
    text = normalize_latex(_with_unit(text) if with_unit else text, _NORMALIZATION)
    try:
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
    if not isinstance(reading, Eq | And):
        return False
    sides = {side for equation in reading.atoms(Eq) for side in equation.args if side.is_number}
    numbers = [complex(side.evalf(5)) for side in sides] if len(sides) > 1 else []
    return any(abs(number - numbers[0]) > 0.01 * abs(numbers[0]) for number in numbers)


def _states_no_value(reading: Any) -> bool:
    """Whether an equation is more than a name and its value: ``x+y=0`` does not state 0, nor ``3x=6`` 6."""
    first = reading.args[0] if isinstance(reading, And) else reading
    return isinstance(first, Eq) and not _is_name(first.lhs)


def _is_name(side: Any) -> bool:
    if (
        not isinstance(side, Expr)
        or side.is_number
        or side.is_Symbol
        or side.is_Function
        or isinstance(side, Derivative)
    ):
        return True
    factors = side.args if side.is_Mul else [side]
    bases = [factor.base if factor.is_Pow and factor.exp == -1 else factor for factor in factors]
    return all(not base.is_number and (base.is_Symbol or base.is_Function) for base in bases)


def _leading_zeros(gold: Any) -> int:
    """Decimal places up to the first digit of a ground truth that is a number below 1; 0 for everything else."""
    if not isinstance(gold, Expr) or not gold.is_number or not (size := abs(gold).evalf(3)).is_Float:
        return 0
    return max(0, -_magnitude(size))


def _magnitude(size: Float) -> int:
    """The power of ten of a number's first digit, or one less; ``math.log10`` would underflow."""
    return math.floor(math.log10(2) * sum(size._mpf_[2:]))


def _is_nothing(part: Any) -> bool:
    """Whether a part of a difference is 0, known to no digit, or below :data:`EXACT_DIGITS`, where rounding is."""
    return bool(part == 0 or (part.is_Float and (part._prec == 1 or _magnitude(part) < -EXACT_DIGITS)))


def _exact(number: Any) -> Any:
    """A number without decimals, evaluated; None for another expression, and for one that only a numerical method evaluates."""
    if not isinstance(number, Expr) or not number.is_number or number.has(Integral, Sum, Product, Limit, Derivative):
        return None
    return number.xreplace({decimal: Rational(str(decimal)) for decimal in number.atoms(Float)}).doit()


def _numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison of numbers, exact but where one is a decimal or a percentage.

    Its own compares 15 digits after the point, so that 1-2^-60 and 1-2^-61 are equal, and x/2^60 and x/2^61.
    """
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
    if i == len(factors) - 1 or not isinstance(first, Expr | MatrixBase | list):
        return first
    rest = _product(self, factors, i + 1)
    if isinstance(first, list):
        return Derivative(rest, first[0])
    multiply = self.mat_mul_flat if any(getattr(side, "is_Matrix", False) for side in (first, rest)) else self.mul_flat
    return multiply(first, rest)


grader.INVERSE_RELATIONS[Ne] = Ne
_Latex2Sympy.convert_postfix_list = _product
inherited_numeric_eq, grader.sympy_numeric_eq = grader.sympy_numeric_eq, _numeric_eq
inherited_symbolic_eq, grader.sympy_symbolic_eq = grader.sympy_symbolic_eq, _symbolic_eq
inherited_solve, grader.solve = grader.solve, _solve
inherited_symbols, grader.sympy_compare_symbols = grader.sympy_compare_symbols, _compare_symbols


def _either(side: Any) -> bool:
    return isinstance(side, FiniteSet) and all(isinstance(part, Relational) for part in side.args)


def equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` states ``gold``. Raises Unreadable if math-verify cannot read one of them."""
    with_unit = not any(map(_INDEX_I.search, (gold, answer)))
    is_real = not any("i" in _LETTER_I.findall(text) for text in (gold, answer))
    readings = {"ground truth": _read(gold, with_unit, is_real), "answer": _read(answer, with_unit, is_real)}
    if unread := [name for name, reading in readings.items() if reading is None]:
        raise Unreadable(f"math-verify cannot read the {' and the '.join(unread)}")
    sides = list(readings.values())
    if any(
        isinstance(side, Set) and not isinstance(side, FiniteSet) for side in sides
    ):  # x<2 or x>3 states its intervals
        sides = [
            Union(*(part.as_set() for part in side.args)) if _either(side) and "or" in text else side
            for side, text in zip(sides, (gold, answer), strict=True)
        ]
    if any(_states_no_value(side) for side in sides) and not all(grader.is_relation(side) for side in sides):
        return False
    # math-verify counts decimals from the point, so that 1.6e-19 would equal 9.1e-31 and 0.0. Small ground truths get more of
    # them: at least three significant digits.
    rounding = FLOAT_DECIMALS + max(0, _leading_zeros(sides[0]) - 4)
    return verify(
        *([side] for side in sides), float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None
    )


def compare(gold: str, answer: str, cpu_seconds: float) -> bool | str:
    """The verdict, or why there is none. The kernel ends the process, even inside one long call into C, after ``cpu_seconds``
    of processor time, and after :data:`WALL_FACTOR` times that by the clock."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * cpu_seconds)
    try:
        return bool(equal(gold, answer))
    except Exception as error:
        return str(error) if isinstance(error, Unreadable) else type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def give_up_privileges() -> str:
    """Let no program give this process more rights, and make root's one nobody's, whom the limit on new processes binds.

    Returns:
        Why it stays root's; "" where it does not, or never was.
    """
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if os.geteuid() != 0:
        return ""
    files = [Path(module.__file__) for module in [*sys.modules.values()] if getattr(module, "__file__", None)]
    groups = os.getgroups()
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        for path in sorted({*files, *(file.parent for file in files)}):  # libraries load parts of theirs late
            os.close(os.open(path, os.O_RDONLY))
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        with suppress(PermissionError):  # of one who never had the right
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)
        return f"nobody cannot use {error.filename}" if error.filename else str(error)
    return ""


def confine() -> None:
    """Bound the resources of this worker and let it end with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, limit in {"AS": mapped + MEMORY, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}.items():
        with suppress(ValueError):  # lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)


def work(connection: Connection, cpu_seconds: float) -> NoReturn:
    """Be a worker: answer requests until the connection closes, or there were enough of them."""
    status = 1
    try:
        confine()
        for _ in range(_COMPARISONS):
            verdict = compare(*json.loads(connection.recv_bytes()), cpu_seconds)
            connection.send_bytes(json.dumps(verdict).encode())
        status = 0
    except (EOFError, OSError):
        status = CLOSED
    finally:
        os._exit(status)


def main(cpu_seconds: float, connections: list[Connection]) -> None:
    """Load math-verify once, fork a worker for each connection, and replace each that ends, until one says that the program
    has ended, with which the other workers end. The request of a worker that did not reply gets the reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first use of math-verify loads half of sympy, which must not count against the first answer.
    for pair in (("\\frac{x}{2}", "0.5x"), ("\\sqrt{12}", "2\\sqrt{3}"), ("\\{1, 2\\}", "2, 1"), ("(0, 1]", "x=3")):
        equal(*pair)
    if reason := give_up_privileges():
        print(
            "grail_advantage.reward: the processes that compare answers are root's, so that they may start others "
            f"({reason}); run as another user, or with Python and its packages where every user can read them",
            file=sys.stderr,
        )
    ends = {
        -signal.SIGKILL: "killed",
        -signal.SIGPROF: f"more than {cpu_seconds:g} s of processor time",
        -signal.SIGALRM: f"no verdict within {WALL_FACTOR * cpu_seconds:g} s",
    }
    working: dict[int, Connection] = {}
    while True:
        for connection in set(connections) - {*working.values()}:
            if (worker := os.fork()) == 0:
                work(connection, cpu_seconds)
            working[worker] = connection
        worker, status = os.wait()
        connection, code = working.pop(worker), os.waitstatus_to_exitcode(status)
        if code == CLOSED:
            return
        if code != 0:
            connection.send_bytes(json.dumps(ends.get(code, f"the worker ended with status {code}")).encode())


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the program has ended
        main(float(sys.argv[1]), [Connection(int(descriptor)) for descriptor in sys.argv[2:]])
