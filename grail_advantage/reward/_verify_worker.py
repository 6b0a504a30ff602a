"""The process that compares answers with math-verify; ``grail_advantage.reward._verify_pool`` starts it as a script.

It loads math-verify once, forks a worker for each connection, and replaces one that takes too long or dies. A request
is the JSON list ``[gold, answer]`` (LaTeX without the box); a reply is true, false, or why there is no verdict.
"""

import ctypes
import gc
import json
import logging
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
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import grader, verify
from sympy import Eq, Expr, Float

sys.path.insert(0, str(Path(__file__).parent))  # a script has no package

import patches  # as it is imported, math-verify is patched

FLOAT_DECIMALS = 6  # that two numbers must share if one is written as a decimal; math-verify's own
MEMORY = 1 << 30  # bytes that a worker may map beyond those that it starts with
CLOSED = 3  # status of a worker whose connection has no other end any more
_COMPARISONS = 5000  # of one worker, which grows by some kB with each: caches of sympy and ANTLR

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, malformed_operators=True, nits=True, boxed="none"
)
# math-verify reads these in part: a box among others, dots, the digits of a numeral without its base, a name's letters;
# or as something else: ``n!!`` as ``(n!)!``, and the exponent ``T`` of what is no matrix as nothing.
_IN_PART = re.compile(
    r"\\(?:boxed|fbox|angle|triangle|overline|[lcdv]?dots)(?![A-Za-z])|\.\.\.|[#@?]|[0-9]\)? ?_|[0-9]'"
    r"|(?<![_^0-9.])[0-9.]+ [0-9]|! ?!|(?<!matrix\})\^ ?(?:T|\{ ?T ?\}|\{? ?\\top(?![A-Za-z]))"
)
_LETTER_I = re.compile(
    r"\\(?:text|operatorname|begin|end|hat|vec|bar) ?\{[^{}]*\}|\\[A-Za-z]+|[iI]"
)
# Inequalities that math-verify would take for a list without order, or compare in their order
_CONDITIONS = re.compile(r"(?:[<>]|\\[lg]eq?(?![a-z])).*(?:\b(?:and|or)\b|>|\\geq?(?![a-z]))")
_INDEX_I = re.compile(
    r"_ ?(?:i|\{[^{}]*i)|(?<![A-Za-z\\])i ?(?:[=<>]|\\(?:[lg]eq?|in)(?![A-Za-z]))"
)


@lru_cache(maxsize=256)
def _read(text: str, with_unit: bool, is_real: bool) -> Any:
    """math-verify's reading of a whole text, None if there is none. ``math_verify.parse`` would go on to a part that it
    can read, so that ``1 \\mid 5`` states 5."""
    if _IN_PART.search(text) or not all(map(_is_whole, re.findall(r"\\[A-Za-z]+", text))):
        return None
    # ``i`` as math-verify spells the imaginary unit, ``I``, and a letter ``I`` as another one
    if with_unit:
        # In braces, as the grammar drops the exponent of a bare ``I``: ``i^2`` would be ``i``.
        text = _LETTER_I.sub(
            lambda match: {"i": "{I}", "I": r"\iota "}.get(match[0], match[0]), text
        )
    try:
        text = normalize_latex(text, _NORMALIZATION)
        reading = latex2sympy(
            text,
            is_real=is_real,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        return None if _contradicts_itself(reading) else reading
    except Exception:
        return None


def _solutions(text: str) -> sympy.Set | None:
    """Returns the values of the one variable of inequalities, with ``and`` and ``or`` between them, or an interval;
    None for anything else."""
    variables: set[sympy.Symbol] = set()
    union = []
    with suppress(Exception):
        for part in re.split(
            r"\\text\{ ?or ?\}|\bor\b", re.sub(r"[A-Za-z] ?\\in(?![A-Za-z])", "", text)
        ):
            readings = [
                _read(condition, True, True)
                for condition in re.split(r"\\text\{ ?and ?\}|\band\b", part)
            ]
            variables.update(*(reading.free_symbols for reading in readings))
            sets = [
                reading if isinstance(reading, sympy.Set) else reading.as_set()
                for reading in readings
            ]
            union.append(sympy.Intersection(*sets))
        return sympy.Union(*union) if len(variables) < 2 else None
    return None


@lru_cache(maxsize=1024)
def _is_whole(command: str) -> bool:
    """Returns whether the grammar does not take a command for a shorter one and letters, as ``\\pmod`` for ``\\pm
    od``."""
    for text in (command, command + "{x}"):
        lexer = PSLexer(InputStream(text))
        lexer.removeErrorListeners()
        if not 1 < len(lexer.nextToken().text.removesuffix("<EOF>")) < len(command):
            return True
    return False


def _contradicts_itself(reading: Any) -> bool:
    """Returns whether a chain of equations has two numbers more than a rounding apart, as ``x=1=5`` has."""
    if not isinstance(reading, Eq | sympy.And):
        return False
    sides = {side for equation in reading.atoms(Eq) for side in equation.args if side.is_number}
    if len(sides) < 2:
        return False
    numbers = [complex(side.evalf(5)) for side in sides]
    # x=2/3=0.67 is a rounding.
    return any(abs(number - numbers[0]) > 0.01 * abs(numbers[0]) for number in numbers)


def _states_no_value(reading: Any) -> bool:
    """Returns whether an equation is more than a name and its value: ``x+y=0`` does not state 0, nor ``3x=6`` 6."""
    first = reading.args[0] if isinstance(reading, sympy.And) else reading
    side = first.lhs if isinstance(first, Eq) else None
    if not isinstance(side, Expr) or side.is_number or isinstance(side, sympy.Derivative):
        return False
    factors = (
        factor.base if factor.is_Pow and factor.exp == -1 else factor
        for factor in sympy.Mul.make_args(side)
    )
    return any(
        factor.is_number or not (factor.is_Symbol or factor.is_Function) for factor in factors
    )


def equal(gold: str, answer: str) -> bool | str:
    """Returns whether ``answer`` states ``gold``, or which of them math-verify cannot read."""
    texts = (gold, answer)
    with_unit = not any(map(_INDEX_I.search, texts))
    is_real = not any("i" in _LETTER_I.findall(text) for text in texts)
    sides = [_read(text, with_unit, is_real) for text in texts]
    if None in sides:
        return f"math-verify cannot read the {'ground truth' if sides[0] is None else 'answer'}"
    if any(map(_CONDITIONS.search, texts)):
        sides = [_solutions(text) for text in texts]
        if None in sides:
            return "the inequalities are not of one variable"
    if any(map(_states_no_value, sides)) and not all(map(grader.is_relation, sides)):
        return False
    # math-verify counts decimals from the point, by which 1.6e-19 is 0.0. Small golds get three significant digits.
    rounding = FLOAT_DECIMALS
    size = abs(sides[0]).evalf(3) if isinstance(sides[0], Expr) and sides[0].is_number else None
    if isinstance(size, Float):
        # 1.6e-19 gets 15 decimals more, 21, the last three of which are its digits.
        rounding += max(0, -patches.magnitude(size) - 4)
    return bool(
        verify(*sides, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None)
    )


def compare(gold: str, answer: str, cpu_seconds: float) -> bool | str:
    """Returns the verdict, or why there is none. The kernel ends the process after that processor time, even inside one
    long call into C, however long the clock says it took."""
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        return equal(gold, answer)
    except Exception as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


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
        # A fork must not run what its server registered for its own end.
        os._exit(status)


def confine() -> None:
    """Bound the resources of this process, let it end with its parent, and let no program give it more rights."""
    for option, value in ((1, signal.SIGKILL), (38, 1)):  # PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, limit in {
        "AS": mapped + MEMORY,
        "FSIZE": 0,
        "CORE": 0,
        "NPROC": 0,
        "NOFILE": 64,
    }.items():
        with suppress(ValueError):  # lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)


def main(cpu_seconds: float, connections: list[Connection]) -> None:
    """Fork a worker for each connection, and replace each that ends; a request that it leaves gets the reason."""
    # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first use of math-verify loads half of sympy, which must not count against the first answer.
    for pair in (
        ("\\frac{x}{2}", "0.5x"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("\\{1, 2\\}", "2, 1"),
        ("(0, 1]", "x=3"),
    ):
        equal(*pair)
    gc.freeze()  # a worker that looked for garbage in what they share would copy its pages
    ends = {
        -signal.SIGKILL: "killed",
        -signal.SIGPROF: f"more than {cpu_seconds:g} s of processor time",
    }
    working: dict[int, Connection] = {}
    server = os.getpid()
    while True:
        for connection in set(connections) - {*working.values()}:
            if (worker := os.fork()) == 0:
                work(connection, cpu_seconds, server)
            working[worker] = connection
        worker, status = os.wait()
        connection = working.pop(worker)
        code = os.waitstatus_to_exitcode(status)
        if code == CLOSED:  # with the program; the other workers end with this process
            os._exit(0)
        if code != 0:
            connection.send_bytes(
                json.dumps(ends.get(code, f"the worker ended with status {code}")).encode()
            )


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the program has ended
        main(float(sys.argv[1]), [Connection(int(descriptor)) for descriptor in sys.argv[2:]])
