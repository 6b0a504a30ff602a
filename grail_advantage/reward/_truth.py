"""Ground truths as text, whatever a data set holds them in, and the ones that cannot be used, with their rows."""

import ast
import json
import logging
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from numbers import Number, Rational
from typing import Any

import numpy as np

from grail_advantage.answers.format import iter_boxed
from grail_advantage.reward._normal import normal

logger = logging.getLogger(__name__)

# Longer texts count as incorrect without being parsed: math-verify takes seconds for them.
MAX_ANSWER_CHARS = 1000
_REMEDY = "give text, a number or a list of them"
_NOTHING = re.compile(r"(?i)\[?\s*(?:nan|null|<na>|nat|)\s*\]?|\{\s*\}|\(\s*\)")
_QUOTED = re.compile(
    r"[\[({]*\s*(['\"]).*\1\s*[\])}]*|\{\s*['\"].*:.*\}|\[.*\b(?:null|None|NaN)\b.*\]", re.DOTALL
)
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\(?!u[0-9a-fA-F]{4}|[\\\"'/])")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}``, or None; linear in the text's length."""
    # Lone surrogates, which a tokenizer's decoder can produce, survive the round trip.
    data = text.encode("utf-8", "surrogatepass")
    boxes = [*iter_boxed(data)]
    if not boxes:
        return None
    _, start, end, *_ = boxes[-1]
    return data[start:end].decode("utf-8", "surrogatepass")


def gold_text(ground_truth: Any) -> str:
    r"""Returns the ground truth as text: text, UTF-8 bytes, a number (Python's, numpy's, of a tensor; ``Decimal``,
    ``Fraction``), or several of these in a list, a tuple, a set, an array or JSON text such as ``["2", "3"]``, which
    become one list with commas. ValueError, which shows it: there is none, such as ``None``, nan, a mapping or no text.
    """
    with suppress(ValueError, TypeError, OverflowError, RuntimeError):  # of whatever reads it
        if (text := _text(ground_truth)) is not None:
            return text
    raise ValueError(f"ground_truth is {shown(ground_truth)}: {_REMEDY}")


def _text(value: Any) -> str | None:
    """Returns None, or raises any error, for what states no answer."""
    if isinstance(value, bytes | bytearray):
        return _text(value.decode())
    # A number of numpy's has it, too, and is read with the digits that numpy writes.
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = np.asarray(value)
        return _text(list(array) if array.ndim else array[()])
    if isinstance(value, str):
        value = _unpacked(value)
    if isinstance(value, set | frozenset):
        # The same text in each process, whatever the order of hashes.
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        entries = [gold_text(entry) for entry in value]
        if len(entries) > 1:
            entries = [normal(entry) for entry in entries]
        # The space keeps "1", "234" from reading as 1,234.
        value = ", ".join(entries)
    if isinstance(value, str):
        boxed = last_boxed(value)
        text = value if boxed is None else boxed
        return None if _NOTHING.fullmatch(text.strip(" \t\r\n$")) else text
    if isinstance(value, bool | np.bool_):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) >= MAX_ANSWER_CHARS:
            return None  # 1e999999 would be a million digits
        return format(value, "f")
    if isinstance(value, Rational):  # a whole number, too
        return str(Fraction(value))
    if not isinstance(value, Number):
        return None
    value = float(str(value))  # the digits that numpy writes: 0.1 in float16 is 0.1
    if not math.isfinite(value):
        return None
    return str(int(value)) if value.is_integer() else str(value)


def _unpacked(text: str) -> Any:
    """Returns what JSON text, or that of Python's list, set or string, holds: ``["2", "3"]``. Other text stays: ``[1,
    2]``."""
    stripped = text.strip()
    if len(stripped) > MAX_ANSWER_CHARS or not _QUOTED.fullmatch(stripped):
        return text
    if _LATEX.search(stripped):  # `["\frac12"]`, whose backslashes nobody doubled
        stripped = re.sub(r"\\(?![\"'])", r"\\\\", stripped)
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(stripped)
    return text


def shown(value: Any) -> str:
    """Returns a value for messages, at most 100 characters of it."""
    try:
        return f"{value!r:.100}"
    except Exception as error:  # whatever the value's class raises
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def check_ground_truths(truths: Iterable[Any], source: str) -> list[int]:
    """Names the ground truths of a data set (one for each row of ``source``) that cannot be used, in one warning.
    Returns their rows, counted from 0: no response to them would be right. ValueError: none can be used."""
    faults = {}
    row = -1
    for row, truth in enumerate(truths):
        try:
            if (length := len(gold_text(truth))) > MAX_ANSWER_CHARS:
                faults[row] = f"{length} characters, more than {MAX_ANSWER_CHARS}"
        except ValueError:
            faults[row] = shown(truth)
    if faults:
        examples = [f"row {number} ({fault})" for number, fault in faults.items()]
        if len(examples) > 5:
            examples[5:] = ["..."]
        counts = f"{len(faults)} of {row + 1} ground truths cannot be used, counted from row 0"
        message = f"{source}: {counts}: {', '.join(examples)}; {_REMEDY}. No response to these rows is right"
        # Rows count from 0: 3 faults are all where the last row is 2.
        if len(faults) > row:
            raise ValueError(message)
        logger.warning("%s", message)
    return list(faults)
