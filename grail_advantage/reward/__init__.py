r"""The one reward function: 1 when the last ``\boxed{...}`` of a response states the ground truth, else 0.

``compute_score`` is verl's custom reward function (``reward.custom_reward_function.path=pkg://grail_advantage.reward``,
``name=compute_score``). The reward is the one of GRAIL (arXiv 2606.04889): the last box compared with the ground truth
by math-verify. ``_normal`` brings both texts to one normal form, ``_exact`` makes the comparisons that need no
math-verify, ``_verify_pool`` lets math-verify read and compare both as a whole, in child processes with limits, since
the answer is untrusted text. What cannot be read as a whole has no verdict: 0, and counted by ``verify_failed``. Of
several ground-truth answers the box must hold all, in any order, as in ``\boxed{2, 3}``; docs/evaluation.md.
"""

import ctypes
import importlib.util
import logging
import re
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

import regex

from grail_advantage.reward import _exact, _verify_pool
from grail_advantage.reward._normal import WORDS, normal, read
from grail_advantage.reward._truth import (
    MAX_ANSWER_CHARS,
    check_ground_truths,
    gold_text,
    last_boxed,
    shown,
)
from grail_advantage.reward._words import same_units

__all__ = ["check_ground_truths", "compute_score", "gold_text", "last_boxed"]

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("grail_advantage.reward needs math_verify: pip install math-verify==0.9.0")
if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "prctl"):
    remedy = "run it in a Linux container, or pass a reward function of your own"
    raise ImportError(
        f"grail_advantage.reward needs Linux, whose prctl bounds the process that reads untrusted answers; {remedy}"
    )
_verify_pool.cpu_seconds()  # a bad environment variable is reported now, not by a reward of 0

logger = logging.getLogger(__name__)

# Longer predictions are cut in the returned dictionary, which verl keeps for each response.
MAX_PRED_CHARS = 128
_PERCENT = re.compile(r" ?\\?%")
_HUNDREDTHS = re.compile(rf"{_exact.PLAIN.pattern}(?={_PERCENT.pattern})")
_E_NOTATION = re.compile(
    rf"(?<![A-Za-z0-9_.,])({_exact.UNSIGNED})[eE]([+-]?[0-9]{{1,3}})(?![0-9.])"
)
# Words, and a letter between digits: hours and minutes, a remainder, or a product that nobody writes so.
_UNREADABLE = regex.compile(
    rf"{WORDS.pattern}|(?<![A-Za-z_^{{0-9.])[0-9.]+ ?(?![eE][-+]?[0-9])[A-Za-z] ?[0-9]"
)
# A name in front of an answer that math-verify cannot read.
_NAME = re.compile(
    r"(?:m ?)?\\(?:angle|triangle|overline|widehat|measuredangle)(?![A-Za-z]) ?\{?[A-Z ]+\}? ?= ?(?=[^=]+$)"
)
_reported: set[str] = set()  # what the log has warned of


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Judge one response; may be called from any number of threads, and raises nothing.

    Args:
        data_source: name of the data set; all are scored alike.
        solution_str: the response's text.
        ground_truth: the ground truth, as :func:`gold_text` reads it: LaTeX or text with or without ``$`` and
            ``\boxed``, a number, or several of these.
        extra_info: its ``index`` names the row in the log where the ground truth cannot be read.

    Returns:
        ``score`` and ``acc`` (the same; verl's validation reports ``acc``): 1.0 or 0.0; ``answer_found``: 1.0 for a
        complete box; ``verify_failed``: 1.0 for one without a verdict (out of time or memory, too long, one of the two
        texts unreadable), which scores 0; ``pred``: the box's content, cleaned, at most 128 characters.
    """
    gold = answer = equal = None
    try:
        gold = gold_text(ground_truth)
    except ValueError as error:
        index = extra_info.get("index") if isinstance(extra_info, dict) else None
        _log(
            "ground truth",
            "%s%s; its responses score 0",
            "" if index is None else f"row {index}: ",
            error,
        )
    try:
        answer = last_boxed(solution_str)
        if answer is not None and gold is not None:
            equal = is_equal(gold, answer)
    except Exception as error:
        is_expected = isinstance(error, _verify_pool.VerifyFailed | ValueError)
        message = "no verdict on %.100r against %s: %s"
        _log(
            str(error),
            message,
            answer,
            shown(ground_truth),
            error,
            exc_info=None if is_expected else error,
        )
    score = float(bool(equal))
    return {
        "score": score,
        "acc": score,
        "answer_found": float(answer is not None),
        "verify_failed": float(answer is not None and equal is None),
        "pred": _printable(answer or ""),
    }


def _log(kind: str, message: str, *arguments: Any, **options: Any) -> None:
    """The first of a kind is a warning, further ones are for debugging."""
    logger.log(
        logging.DEBUG if kind in _reported else logging.WARNING, message, *arguments, **options
    )
    _reported.add(kind)


# Rollouts of one prompt repeat each other's answers; exceptions are not kept.
@lru_cache(maxsize=8192)
def is_equal(gold: str, answer: str) -> bool:
    """Returns whether ``answer`` (a box's content) states ``gold``. ValueError: one of them is too long to parse, or
    has words or parts that nothing here can compare; grail_advantage.reward._verify_pool.VerifyFailed: math-verify gave
    no verdict within its limits."""
    if not answer.strip():
        return False
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        raise ValueError(
            f"the ground truth or the answer has more than {MAX_ANSWER_CHARS} characters"
        )
    gold_form = read(gold)
    answer_form = read(answer)
    return _states(gold_form.text, answer_form.text) and same_units(
        gold_form.unit, answer_form.unit
    )


def _states(gold: str, answer: str) -> bool:
    """The same for texts in normal form, whatever their units."""
    for comparison in _exact.COMPARISONS:
        verdict = comparison(gold, answer)
        if isinstance(verdict, bool):
            return verdict
        # Two other texts take their place, such as tuples for ratios; None leaves them.
        gold, answer = verdict or (gold, answer)
    if any(map(_UNREADABLE.search, (gold, answer))):
        raise ValueError("the words cannot be compared")
    # Beside a ground truth with a name, the answer's name counts.
    if "=" not in gold:
        answer = _NAME.sub("", answer)
    readings = dict.fromkeys(zip(_readings(gold), _readings(answer), strict=True))
    return any(_same_value(*reading) for reading in readings)


def _readings(text: str) -> tuple[str, str, str]:
    """Returns the values of a text: ``50%`` is 50, and 0.5 beside one without the sign; ``2e-1`` is Euler's number, and
    0.2."""
    value = _PERCENT.sub("", text)
    hundredths = _PERCENT.sub("", _HUNDREDTHS.sub(r"\\frac{\g<0>}{100}", text))
    return value, hundredths, _E_NOTATION.sub(r"\1 \\times 10^{\2}", value)


def _same_value(gold: str, answer: str) -> bool:
    verdict = gold == answer or _exact.same_number(gold, answer)
    if verdict is None:
        return _verify_pool.verify(gold, answer)
    return verdict


def _printable(text: str) -> str:
    """Returns one short line that any encoder can write: control characters and lone surrogates become U+FFFD."""
    with suppress(ValueError):
        text = normal(text[: 2 * MAX_PRED_CHARS])
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:MAX_PRED_CHARS])
