"""The process that compares answers with math-verify; ``grail_advantage.reward._verify_pool`` starts it as a script.

It loads math-verify once and forks workers, which pebble replaces when one takes too long or dies. A request is the JSON list
``[gold, answer]`` (LaTeX without the box); a reply is true, false, or why there is no verdict. The process ends with the one
that started it, and the workers with it. Arguments: seconds of processor time for one comparison, and the descriptors of the
connections.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from pebble import ProcessExpired, ProcessPool
from sympy import And, Eq

# math-verify's limits for numbers of ordinary size: decimals kept for floats, significant digits for expressions.
FLOAT_DECIMALS = 6
EXPRESSION_DIGITS = 15
MEMORY = 1 << 30
"""Bytes that a worker may map beyond those that it starts with."""
WALL_FACTOR = 10  # wall time for each second of processor time: verdicts do not depend on how busy the machine is
_COMPARISONS = 5000  # of one worker, which grows by some kB with each: caches of sympy and ANTLR

_NORMALIZATION = {
    units: NormalizationConfig(units=units, basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    for units in (True, False)
}
# math-verify takes a last letter for a unit, so that `3t` becomes 3. In a ground truth it is a variable.
_ENDS_IN_VARIABLE = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]|ab|bc)\s*$")
# It drops a last `\text{...}` for a unit, and with it all that follows the first: `2\mathbf{i}+3\mathbf{j}` becomes 2.
_WRAPPED = re.compile(r"\\(?:text|math|mbox)[a-z]*\{(?! ?(?:and|or) ?\})[^{}]*\}(?:\^(?:[0-9]|\{[^{}]*\}))?")
_IDLE_BLANK = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")


class Unreadable(Exception):
    """No verdict: the grammar does not cover one of the texts. The message says which."""


@lru_cache(maxsize=256)
def _read(latex: str, units: bool) -> tuple[Any, str]:
    """math-verify's reading of a whole text, None if there is none, and the text as it was read.

    ``math_verify.parse`` would go on to a part of a text that it cannot read: its last equation, its last formula, its last
    number, so that ``1 \\mid 5`` states 5.
    """
    inner = extract_boxed_content(latex, mode="last")
    name, equals, value = inner.rpartition("=")
    units = units and not re.search("[-+0-9]", "".join(_WRAPPED.split(value)[1:]))
    text = normalize_latex(name, _NORMALIZATION[False]) + equals + normalize_latex(value, _NORMALIZATION[units])
    if latex not in (inner, f"\\boxed{{{inner}}}", f"\\fbox{{{inner}}}"):
        return None, text
    try:
        reading = latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=None)
        return (None if _contradicts_itself(reading) else reading), text
    except Exception:
        return None, text


def _contradicts_itself(reading: Any) -> bool:
    """Whether a chain of equations has two numbers more than a rounding apart, as ``x=1=5`` has."""
    if not isinstance(reading, Eq | And):
        return False
    sides = {side for equation in reading.atoms(Eq) for side in equation.args if side.is_number}
    numbers = [complex(side.evalf(5)) for side in sides] if len(sides) > 1 else []
    return any(abs(number - numbers[0]) > 0.01 * abs(numbers[0]) for number in numbers)


@lru_cache(maxsize=256)
def _leading_zeros(gold: str, units: bool) -> int:
    """Decimal places up to the first digit of a ground truth that is a number below 1; 0 for everything else."""
    try:
        size = abs(complex(_read(gold, units)[0].evalf(3)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0
    return -math.floor(math.log10(size)) if 0 < size < 1 else 0


def equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` states ``gold``. Raises Unreadable if math-verify cannot read one of them and the texts differ."""
    units = _ENDS_IN_VARIABLE.search(gold) is None
    readings = {"ground truth": _read(gold, units), "answer": _read(answer, units)}
    if unread := [name for name, (value, _) in readings.items() if value is None]:
        if len({_IDLE_BLANK.sub("", text) for _, text in readings.values()}) == 1:
            return True
        raise Unreadable(f"math-verify cannot read the {' and the '.join(unread)}")
    # math-verify counts decimals from the point, so that 1.6e-19 would equal 9.1e-31 and 0.0. Small ground truths get more of
    # them: at least three significant digits for floats, and the usual 15 for expressions.
    zeros = _leading_zeros(gold, units)
    return verify(
        *map(list, readings.values()),
        float_rounding=FLOAT_DECIMALS + max(0, zeros - 4),
        numeric_precision=EXPRESSION_DIGITS + zeros,
        timeout_seconds=None,
    )


def compare(gold: str, answer: str, cpu_seconds: float) -> bool | str:
    """The verdict, or why there is none. The kernel ends the process, even inside one long call into C, after
    ``cpu_seconds`` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return bool(equal(gold, answer))
    except Exception as error:
        return str(error) if isinstance(error, Unreadable) else type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def confine(connections: list[Connection]) -> None:
    """Bound the resources of this worker and let it end with its parent."""
    for connection in connections:
        connection.close()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, limit in {"AS": mapped + MEMORY, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}.items():
        with suppress(ValueError):  # lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)


def serve(connection: Connection, pool: ProcessPool, cpu_seconds: float) -> None:
    """Answer requests until the connection closes or the pool breaks, and end the process then."""
    try:
        while True:
            arguments = [*json.loads(connection.recv_bytes()), cpu_seconds]
            verdict: bool | str
            try:
                verdict = pool.schedule(compare, arguments, timeout=WALL_FACTOR * cpu_seconds).result()
            except ProcessExpired as error:
                reasons = {-signal.SIGKILL: "killed", -signal.SIGPROF: f"more than {cpu_seconds:g} s of processor time"}
                verdict = reasons.get(error.exitcode, f"the worker ended with status {error.exitcode}")
            except TimeoutError:
                verdict = f"no verdict within {WALL_FACTOR * cpu_seconds:g} s"
            connection.send_bytes(json.dumps(verdict).encode())
    finally:
        os._exit(0)


def main(cpu_seconds: float, descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first use of math-verify loads half of sympy, which must not count against the first answer.
    for pair in (("\\frac{x}{2}", "0.5x"), ("\\sqrt{12}", "2\\sqrt{3}"), ("\\{1, 2\\}", "2, 1"), ("(0, 1]", "x=3")):
        equal(*pair)
    connections = [Connection(descriptor) for descriptor in descriptors]
    context = multiprocessing.get_context("fork")
    pool = ProcessPool(len(connections), _COMPARISONS, confine, (connections,), context)
    for connection in connections:
        threading.Thread(target=serve, args=(connection, pool, cpu_seconds)).start()


if __name__ == "__main__":
    main(float(sys.argv[1]), [int(descriptor) for descriptor in sys.argv[2:]])
