"""Child process that runs math-verify on untrusted answers; started by ``grail_advantage.reward._verify_pool`` as a script.

It reads one JSON line per request from standard input, ``{"gold": LaTeX, "pred": LaTeX}``, and answers each with one JSON
line, ``{"equal": bool, "last": bool}`` or ``{"error": text, "last": bool}``; ``last`` says that it leaves after this answer.
An answer that needs more processor time than allowed makes the kernel end the process, whatever Python is doing then. The first
line, ``{"confined": [...], "missing": {...}}``, says that it is ready and which layers of ``_confine`` hold.

Arguments: seconds of processor time for one request, bytes of memory that answers may take, bytes of memory beyond which
the worker leaves after its answer, so that sympy's and ANTLR's caches cannot grow without end.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import resource
import signal
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Run as a script, Python puts this file's folder first on the path, where it could hide an installed module.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path.pop(0)

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# math-verify's limits for numbers of ordinary size: decimals kept for floats, significant digits for expressions.
FLOAT_DECIMALS = 6
EXPRESSION_DIGITS = 15

_UNITS_OFF = NormalizationConfig(units=False, basic_latex=True, malformed_operators=True, nits=True, boxed="all")
_EXTRACTION = {
    True: (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
    False: (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_UNITS_OFF), ExprExtractionConfig()),
}
# math-verify takes a last letter for a unit, so that `3t` becomes 3. In a gold answer it is a variable.
_ENDS_IN_VARIABLE = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]|ab|bc)\s*$")

_FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.symlink",
    "os.link",
    "os.truncate",
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
    "pty.",
)


def _refuse_side_effects(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: sympy evaluates text as Python, so whatever slips through must not reach the system."""
    if event == "open":
        flags = args[2]
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError("a verification may not write files")
    elif event.startswith(_FORBIDDEN_EVENTS):
        raise PermissionError(f"a verification may not use {event}")


_create_parser = _Latex2Sympy.create_parser


def _create_fast_parser(self: _Latex2Sympy, latex: str) -> Any:
    """ANTLR's two-stage parsing: SLL prediction finds the same tree as LL prediction, several times as fast, or fails.

    Parsing takes nearly all the time of a verification, and latex2sympy2_extended 1.11.0 always parses with LL.
    """
    parser = _create_parser(self, latex)
    parser._interp.predictionMode = PredictionMode.SLL
    try:
        tree = parser.math()
    except Exception:
        return _create_parser(self, latex)  # from the first character on, so that errors of the lexer come again
    return SimpleNamespace(math=lambda: tree)


@lru_cache(maxsize=256)
def _parse(latex: str, units: bool) -> list[Any]:
    return parse("\\boxed{" + latex + "}", extraction_config=_EXTRACTION[units], parsing_timeout=None)


@lru_cache(maxsize=256)
def _leading_zeros(gold: str, units: bool) -> int:
    """Decimal places up to the first digit of a gold answer that is a number below 1; 0 for everything else."""
    try:
        size = abs(complex(_parse(gold, units)[0].evalf(3)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0
    return -math.floor(math.log10(size)) if 0 < size < 1 else 0


def equal(gold: str, pred: str) -> bool:
    """Whether ``pred`` states ``gold``; both are LaTeX without the box."""
    units = _ENDS_IN_VARIABLE.search(gold) is None
    if not _parse(gold, units):
        raise ValueError("math-verify cannot read the gold answer")
    # math-verify counts decimals from the point, so that 1.6e-19 would equal 9.1e-31 and 0.0. Small golds get more of
    # them: at least three significant digits for floats, and the usual 15 for expressions.
    zeros = _leading_zeros(gold, units)
    return verify(
        _parse(gold, units),
        _parse(pred, units),
        float_rounding=FLOAT_DECIMALS + max(0, zeros - 4),
        numeric_precision=EXPRESSION_DIGITS + zeros,
        timeout_seconds=None,
    )


def _memory(statm: int) -> tuple[int, int]:
    """Bytes mapped and bytes resident, from ``/proc/self/statm``, which stays open: later nothing there can be opened.
    (getrusage would count what the parent had before it started this program.)"""
    mapped, resident = os.pread(statm, 128, 0).split()[:2]
    return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _libraries() -> list[Path]:
    """Where what is imported here comes from; sympy and ANTLR load parts of themselves when they are needed."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    for name, module in sys.modules.items():
        if "." not in name and (origin := getattr(module.__spec__, "origin", None)) and os.path.isabs(origin):
            is_package = getattr(module, "__path__", None) is not None
            folders.add(os.path.dirname(os.path.dirname(origin) if is_package else origin))
    return [Path(folder) for folder in sorted(folders) if os.path.isdir(folder)]


def _sibling(name: str) -> ModuleType:
    """A module of this file's folder, without the package around it, which would load torch."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(cpu_seconds: float, memory: int, retire_at: int) -> None:
    # Only this copy of the pipe carries answers; whatever else a library prints goes nowhere.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; Ctrl-C reaches the whole process group
    _Latex2Sympy.create_parser = _create_fast_parser
    # The first use of math-verify loads half of sympy, which must not count against the first answer.
    for gold, pred in (
        ("\\frac{x}{2}", "0.5x"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("\\{1, 2\\}", "2, 1"),
        ("(0, 1]", "x=3"),
    ):
        equal(gold, pred)
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    confinement = _sibling("_confine")
    libraries = _libraries()
    sys.dont_write_bytecode = True
    confinement.lower_limit(resource.RLIMIT_AS, _memory(statm)[0] + memory)
    active, missing = confinement.confine(libraries)
    replies.write(json.dumps({"confined": active, "missing": missing}) + "\n")  # ready
    replies.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.addaudithook(_refuse_side_effects)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Processor time, not wall time: the verdict must not depend on how busy the machine is. The default action of
        # SIGPROF ends the process even inside a single long call into C.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply: dict[str, Any]
        try:
            reply = {"equal": bool(equal(request["gold"], request["pred"]))}
        except Exception as error:
            reply = {"error": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply["last"] = _memory(statm)[1] > retire_at
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply["last"]:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
