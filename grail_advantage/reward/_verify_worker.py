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

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from pebble import ProcessExpired, ProcessPool

# math-verify's limits for numbers of ordinary size: decimals kept for floats, significant digits for expressions.
FLOAT_DECIMALS = 6
EXPRESSION_DIGITS = 15
MEMORY = 1 << 30
"""Bytes that a worker may map beyond those that it starts with."""
WALL_FACTOR = 10  # wall time for each second of processor time: verdicts do not depend on how busy the machine is
_COMPARISONS = 5000  # of one worker, which grows by some kB with each: caches of sympy and ANTLR

_UNITS_OFF = NormalizationConfig(units=False, basic_latex=True, malformed_operators=True, nits=True, boxed="all")
_EXTRACTION = {
    True: (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
    False: (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_UNITS_OFF), ExprExtractionConfig()),
}
# math-verify takes a last letter for a unit, so that `3t` becomes 3. In a ground truth it is a variable.
_ENDS_IN_VARIABLE = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]|ab|bc)\s*$")


@lru_cache(maxsize=256)
def _parse(latex: str, units: bool) -> list[Any]:
    return parse("\\boxed{" + latex + "}", extraction_config=_EXTRACTION[units], parsing_timeout=None)


@lru_cache(maxsize=256)
def _leading_zeros(gold: str, units: bool) -> int:
    """Decimal places up to the first digit of a ground truth that is a number below 1; 0 for everything else."""
    try:
        size = abs(complex(_parse(gold, units)[0].evalf(3)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0
    return -math.floor(math.log10(size)) if 0 < size < 1 else 0


def equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` states ``gold``. Raises ValueError for a ground truth that math-verify cannot read."""
    units = _ENDS_IN_VARIABLE.search(gold) is None
    if not _parse(gold, units):
        raise ValueError("math-verify cannot read the ground truth")
    # math-verify counts decimals from the point, so that 1.6e-19 would equal 9.1e-31 and 0.0. Small ground truths get more of
    # them: at least three significant digits for floats, and the usual 15 for expressions.
    zeros = _leading_zeros(gold, units)
    return verify(
        _parse(gold, units),
        _parse(answer, units),
        float_rounding=FLOAT_DECIMALS + max(0, zeros - 4),
        numeric_precision=EXPRESSION_DIGITS + zeros,
        timeout_seconds=None,
    )


def compare(gold: str, answer: str, cpu_seconds: float) -> bool | str:
    """The verdict, or the name of an error. The kernel ends the process, even inside one long call into C, after
    ``cpu_seconds`` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return bool(equal(gold, answer))
    except Exception as error:
        return type(error).__name__
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
