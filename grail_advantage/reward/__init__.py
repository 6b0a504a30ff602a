r"""The one reward function: 1 when the last ``\boxed{...}`` of a response states the ground truth, else 0.

``compute_score`` is verl's custom reward function (``reward.custom_reward_function.path=pkg://grail_advantage.reward``,
``name=compute_score``), and evaluation calls it too, so that training, validation and evaluation agree.

The reward is the one of GRAIL (arXiv 2606.04889): the last box compared with the ground truth by math-verify. Equal numbers, a
whole number and another one, and two texts that are the same after cleaning are compared here; everything else goes to
math-verify in a child process with limits (``grail_advantage.reward._verify_pool``), since the answer is untrusted text. Rules:

- numbers: exactly, except that a decimal against another decimal or a fraction may differ after the sixth decimal place
  (after the third significant digit for numbers below 0.001), as in math-verify;
- thousands separators (``1,234``, ``1{,}234``, ``1\,234``, ``1,\!234``), ``$``, ``\$``, degrees and units are ignored, units
  also when they differ; ``\!`` is nothing, so that ``10,\!080`` states 10080 and no list;
- words: letters alone are words if one side has two or more of them in a wrapper (``\text{no}``), or three or more without one.
  Words are the same letters in the same order, in either case and however they are spaced: ``\text{Evelyn}`` states ``evelyn``,
  ``\text{east}`` not ``\text{seat}``. Other letters are variables, of which ``xy`` and ``yx`` are one product;
- a percent sign on one side only: ``50\%`` states both 50 and 0.5; ``2e-1`` states both 0.2 and twice Euler's number less 1;
- fonts and sizes (``\large 13``, ``{\bf 13}``) are ignored, and so are signs before an answer (``\approx``, ``=``, currencies);
- sets and lists without order, tuples and intervals with; ``\langle 1,2\rangle`` is a tuple; ``x=5`` states 5;
- a text is read whole or not at all. If math-verify cannot read one of the two, or finds that an answer equates two numbers
  (``x=1=5``), there is no verdict: 0, counted by ``verify_failed``. This holds for ``1 \mid 5``, ``cases``, systems of
  equations and congruences. They are equal only as the same text, spaces aside;
- a list of several ground-truth answers: the box must hold all of them, in any order, as in ``\boxed{2, 3}``.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from grail_advantage.answers.format import iter_boxed
from grail_advantage.reward import _verify_pool

for _package in ("math_verify", "pebble"):
    if importlib.util.find_spec(_package) is None:
        raise ImportError(f"grail_advantage.reward needs {_package}: pip install math-verify==0.9.0 pebble==5.2.3")
_verify_pool.cpu_seconds()  # a bad environment variable is reported now, not by a reward of 0

logger = logging.getLogger(__name__)

# Longer answers count as incorrect without being parsed: math-verify takes seconds for them.
MAX_ANSWER_CHARS = 1000
# Longer predictions are cut in the returned dictionary, which verl keeps and dumps for every response.
MAX_PRED_CHARS = 128

# Not after another backslash: `\\` followed by a space is a row break of a matrix.
_SPACING = re.compile(r"(?<!\\)\\(?:[,;: ]|thinspace(?![A-Za-z]))|~|\\q?quad(?![A-Za-z])")
# A negative thin space with the blanks around it, which TeX ignores; a blank after a backslash is a command.
_TIGHT = re.compile(r"(?:(?<!\\) )?(?<!\\)\\(?:!|negthinspace(?![A-Za-z])) ?")
_TIGHT_LETTERS = re.compile(r"(?<=[A-Za-z])(?:\\!)+(?=[A-Za-z])")
_GAP = r"(?:(?:\\!)*,(?:\\!)+|(?:\\!)+,|(?:\\[,;: !]|\\thinspace|\{,\}|[ ~])+)"
_GAPPED_THOUSANDS = re.compile(
    rf"(?<![0-9.,])[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}})+(?![0-9])|(?<=[^\\]\{{)[0-9]{{1,3}}(?:,[0-9]{{3}})+(?=\}})"
)
_UNICODE = str.maketrans(
    {"\u2212": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u00b0": "^\\circ ", "\u221e": "\\infty "}
    | {"\u27e8": "\\langle ", "\u27e9": "\\rangle "}
)
# What changes the look of an answer alone, and what may stand before one without being part of it.
_LOOK = re.compile(
    r"(?<!\\)\\(?:[\[\]()]|(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm)(?![A-Za-z])"
    r"|color\{[A-Za-z]*\}|(?:left|right) ?\.|math(?:bf|it|rm)(?= ?[0-9]))"
)
_SWITCHED = re.compile(r"\{ ?\\(?:bf|it|rm)(?![A-Za-z]) ?")
_LEAD = re.compile(r"(?:(?:\\(?:approx|simeq|sim|therefore|implies|Rightarrow|to)(?![A-Za-z])|[=#£€¥≈∴⇒→]) ?)+")
# A vector, read as a tuple.
_VECTOR = re.compile(
    r"(?:\\left ?)?\\langle(?![A-Za-z])((?:(?!\\[lr]angle)[^|,])*,(?:(?!\\[lr]angle)[^|])*?)(?:\\right ?)?\\rangle(?![A-Za-z])"
)
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_WHOLE_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_BETWEEN_WORDS = re.compile(r"[,;]|\b(?:and|or)\b")
_PERCENT = re.compile(r" ?(?:\\?%|\\text\{ ?(?:percent|percentage)\.? ?\}|\bpercent\b)")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_E_NOTATION = re.compile(rf"(?<![A-Za-z0-9_.,])({_UNSIGNED})[eE]([+-]?[0-9]{{1,3}})(?![0-9.])")
_NUMBER = re.compile(rf"[+-]? ?{_UNSIGNED}")
_FRACTION = re.compile(
    rf"[+-]? ?(?:\\frac ?\{{ ?-? ?{_UNSIGNED} ?\}} ?\{{ ?{_UNSIGNED} ?\}}|{_UNSIGNED} ?/ ?{_UNSIGNED})"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Judge one response. Never raises; may be called from any number of threads.

    Args:
        data_source: name of the data set; all are scored alike.
        solution_str: the response's text.
        ground_truth: the ground truth: LaTeX or text with or without ``$`` and ``\boxed``, a number, or a list of these.
        extra_info: not used.

    Returns:
        ``score`` and ``acc``: 1.0 or 0.0 (the same; verl's validation reports ``acc``); ``answer_found``: 1.0 if there is a
        complete box; ``verify_failed``: 1.0 if there is one but no verdict (out of time or memory, answer too long, answer
        or ground truth unreadable), which scores 0; ``pred``: the box's content, cleaned, at most 128 characters, "" if none.
    """
    answer, equal, failed = None, False, False
    try:
        answer = last_boxed(solution_str)
        if answer is not None:
            equal = is_equal(gold_text(ground_truth), answer)
    except Exception as error:
        failed = True
        expected = isinstance(error, _verify_pool.VerifyFailed | ValueError)
        level, trace = (logging.INFO, None) if expected else (logging.WARNING, error)
        logger.log(level, "no verdict on %.100r against %.100r: %s", answer, ground_truth, error, exc_info=trace)
    return {
        "score": float(equal),
        "acc": float(equal),
        "answer_found": float(answer is not None),
        "verify_failed": float(failed),
        "pred": _printable(answer or ""),
    }


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, or None; linear in the text's length."""
    # Lone surrogates, which a tokenizer's decoder can produce, survive the round trip.
    data = text.encode("utf-8", "surrogatepass")
    last = None
    for _, content_start, content_end, _ in iter_boxed(data):
        last = content_start, content_end
    return None if last is None else data[slice(*last)].decode("utf-8", "surrogatepass")


def gold_text(ground_truth: Any) -> str:
    """The ground truth as text; several answers become one comma-separated list. Raises ValueError if there is none."""
    if hasattr(ground_truth, "tolist"):  # numpy scalars and arrays, as parquet files give them
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, list | tuple):
        entries = [gold_text(entry) for entry in ground_truth]
        # The space keeps "1", "234" from reading as 1,234.
        text = ", ".join(_clean(entry) for entry in entries) if len(entries) > 1 else "".join(entries)
    elif isinstance(ground_truth, float) and ground_truth.is_integer():
        text = str(int(ground_truth))
    elif isinstance(ground_truth, str | int) or (isinstance(ground_truth, float) and math.isfinite(ground_truth)):
        text = str(ground_truth)
    else:
        raise ValueError(f"ground_truth is {ground_truth!r:.100}: give a string, a number or a list of them")
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    if not text.strip():
        raise ValueError("ground_truth is empty")
    return text


@lru_cache(maxsize=8192)  # rollouts of one prompt repeat each other's answers; exceptions are not kept
def is_equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` (a box's content) states ``gold``.

    Raises:
        ValueError: one of them is too long to parse.
        grail_advantage.reward._verify_pool.VerifyFailed: math-verify gave no verdict within its limits.
    """
    if not answer.strip():
        return False
    for name, text in (("ground truth", gold), ("answer", answer)):
        if len(text) > MAX_ANSWER_CHARS:
            raise ValueError(f"the {name} has {len(text)} characters, more than {MAX_ANSWER_CHARS}")
    gold, answer = _tidy(gold), _tidy(answer)
    gold_words, answer_words = _words(gold), _words(answer)
    if gold_words and answer_words and (gold_words[1] or answer_words[1]):
        return gold_words[0] == answer_words[0]
    gold, answer = _unwrap(gold), _unwrap(answer)
    gold_value, answer_value = _PERCENT.sub("", gold), _PERCENT.sub("", answer)
    readings: list[tuple[str, ...]] = [(gold_value, answer_value)]
    # A percentage also states its value. Plain numbers only: a list divided by 100 would read as nonsense.
    gold_is_percent, answer_is_percent = gold_value != gold, answer_value != answer
    if gold_is_percent and not answer_is_percent and _is_plain(gold_value):
        readings.append((_hundredth(gold_value), answer_value))
    if answer_is_percent and not gold_is_percent and _is_plain(answer_value):
        readings.append((gold_value, _hundredth(answer_value)))
    # `2e-1` is Euler's number in one answer and a power of ten in another; only the ground truth decides.
    scientific = tuple(_E_NOTATION.sub(r"\1 \\times 10^{\2}", value) for value in (gold_value, answer_value))
    if scientific != (gold_value, answer_value):
        readings.append(scientific)
    return any(_same(*reading) for reading in readings)


def _same(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(answer):
        numbers = [Decimal(re.sub("[, ]", "", text)) for text in (gold, answer)]
        # Two decimals may differ by a rounding, which math-verify decides on; a whole number is exact.
        if numbers[0] == numbers[1] or "." not in gold or "." not in answer:
            return numbers[0] == numbers[1]
    return _verify_pool.verify(gold, answer)


def _words(text: str) -> tuple[set[str], bool] | None:
    """The words of a text of letters alone, and whether it is words by itself; None for every other text."""
    whole = _WHOLE_TEXT.fullmatch(text)
    entries = _BETWEEN_WORDS.split(whole[1] if whole else text)
    words = {re.sub("[ .'-]" if whole else " ", "", entry).casefold() for entry in entries} - {""}
    if not words or not all(word.isalpha() for word in words):
        return None
    return words, max(map(len, words)) >= (2 if whole else 3)


def _clean(text: str) -> str:
    """Drop what never changes an answer (dollar signs, spacing, a full stop) and unify ways to write one number."""
    return _unwrap(_tidy(text))


def _tidy(text: str) -> str:
    text = " ".join(text.replace("\\$", "").replace("$", "").translate(_UNICODE).split())
    text = _GAPPED_THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), _TIGHT.sub(r"\\!", text))
    text = _TIGHT.sub("", _TIGHT_LETTERS.sub(" ", text))
    text = _LOOK.sub(" ", _SWITCHED.sub(r"\\text{", text))
    text = _FRACTION_COMMAND.sub(r"\\frac", _SPACING.sub(" ", text))
    text = " ".join(text.split())
    return _without_stop(_VECTOR.sub(r"(\1)", text[lead.end() :] if (lead := _LEAD.match(text)) else text))


def _unwrap(text: str) -> str:
    whole = _WHOLE_TEXT.fullmatch(text)
    return _without_stop(whole[1].strip()) if whole else text


def _without_stop(text: str) -> str:
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _is_plain(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text) or _FRACTION.fullmatch(text))


def _hundredth(text: str) -> str:
    return f"\\frac{{{text}}}{{100}}"


def _printable(text: str) -> str:
    """One short line that any encoder can write: control characters and lone surrogates become U+FFFD."""
    text = _clean(text[: 2 * MAX_PRED_CHARS])[:MAX_PRED_CHARS]
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
