"""Comparisons of answers in normal form without math-verify: right, wrong, or None, which leaves it to the next one."""

from __future__ import annotations

import re
from decimal import Decimal

_WRAPPED = re.compile(r"\\text\{([^{}]*)\}")
_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])(?:\)|[.:](?= )| -(?= .*[A-Za-z]{3}))) ?(.+)|\(?([A-J])\)?[.:)]?")
_CHOICES = re.compile(r"(?:\([A-J]\)|[A-J])(?:(?:, ?(?:and )?|; ?| and )(?:\([A-J]\)|[A-J]))+")
_NUMERAL = re.compile(r"(?:[A-Za-z]=)?([0-9A-F]+)_?(?:_|base)([0-9]+|[a-z]+)")
_WORDS = "two three four five six seven eight nine ten eleven twelve"
_BASES = {"sixteen": "16"} | {word: str(base) for base, word in enumerate(_WORDS.split(), start=2)}
_SET, _TUPLE = re.compile(r"\\\{[^{}]*,[^{}]*\\\}"), re.compile(r"\([^()]*,[^()]*\)")
_JOINED = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]eq?(?:slant)?|[lg]t|neq?)(?![A-Za-z])")
_IDLE_BLANK = re.compile("(?<![0-9]) | (?![0-9])")
_ENTRIES = re.compile(r"[,;]|\b(?:and|or)\b")
_OUTER = re.compile(r"(?:\(|\[|\\\{)([^()\[\]{}]*?)(?:\)|\]|\\\})")
_JOINED_NUMBERS = re.compile(
    r"(?:[A-Za-z] ?= ?|[vV]\.? ?)?\+?"
    r"((?:\([0-9]+\)[ -]*)?[0-9]+(?: ?\\?%)?(?:(?: ?-{1,3} ?|[./:])[0-9]+(?: ?\\?%)?)+)"
)
# In joined numbers: no difference, quotient or product is written so.
_NO_NUMBER = re.compile(r"[0-9]/[0-9]+/|\.[0-9]+\.|(?<![0-9.:])0[0-9]")
_LABEL = re.compile(rf"^[^/]*-[^/]*$|{_NO_NUMBER.pattern}")
_VALUES = re.compile(r"(?:[A-Za-z] ?= ?)?[-+]? ?(?:\\frac|[0-9./{}% \\]|[,;] ?[-+]?)+")

UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(rf"[+-]? ?{UNSIGNED}")
_FRACTION = rf"\\frac ?\{{ ?-? ?{UNSIGNED} ?\}} ?\{{ ?{UNSIGNED} ?\}}"
PLAIN = re.compile(rf"[+-]? ?(?:{UNSIGNED}|{_FRACTION}|{UNSIGNED} ?/ ?{UNSIGNED})")  # a number or a fraction of two


def same_text(gold: str, answer: str) -> bool | None:
    """The same text is right, whether or not anything can read it; blanks count between digits alone."""
    return _IDLE_BLANK.sub("", gold) == _IDLE_BLANK.sub("", answer) or None


def same_label(gold: str, answer: str) -> bool | None:
    """Dates, ranges, scores, numbers of telephones and versions are texts, and no values: ``5-3`` is not ``3-1``.
    Beside them a number is wrong: ``2`` for ``5-3``. The other way round ``5-3`` may be a difference that nobody
    computed, but ``2024-01-05`` and ``1.2.3`` are none."""
    (golds, gold_entries), (answers, answer_entries) = _labels(gold), _labels(answer)
    if all(golds) and _VALUES.fullmatch(answer) and not any(answers):
        return False
    if (all(golds) and all(answers)) or any(map(_NO_NUMBER.search, golds + answers)):
        in_order = gold.startswith("(") and answer.startswith("(")
        return gold_entries == answer_entries or (not in_order and sorted(gold_entries) == sorted(answer_entries))
    return None


def _labels(text: str) -> tuple[list[str], list[str]]:
    """A list's joined numbers, "" for others; and all entries: without blanks, %, lengths of dashes, leading zeros."""
    labels, entries = [], []
    for entry in _ENTRIES.split(outer[1] if (outer := _OUTER.fullmatch(text)) else text):
        match = _JOINED_NUMBERS.fullmatch(entry.strip())
        joined = re.sub("-+", "-", re.sub(r"[ (%\\]", "", re.sub(r"\)[ -]*", "-", match[1]))) if match else ""
        labels.append(joined if _LABEL.search(joined) else "")
        entries.append(re.sub(r"(?<![0-9.:])0(?=[0-9](?![0-9]))", "", joined) or entry.strip())
    return labels, entries


def same_choice(gold: str, answer: str) -> bool | None:
    """The letter of a choice decides, unless both have text after it, which is compared like an answer."""
    several = [_CHOICES.fullmatch(_WRAPPED.sub(r"\1", text)) for text in (gold, answer)]
    if all(several):
        return len({frozenset(re.findall("[A-J]", match[0])) for match in several if match}) == 1
    (gold_letter, gold_rest), (answer_letter, answer_rest) = choice(gold), choice(answer)
    if gold == f"({gold_letter})":  # in brackets it is no variable, so that its case does not matter
        answer_letter = answer_letter or answer.strip("()").upper()
    if gold_letter and answer_letter and gold_letter != answer_letter:
        return False
    return True if gold_letter and answer_letter and not (gold_rest and answer_rest) else None


def choice(text: str) -> tuple[str, str]:
    """``("B", "12")`` of ``(B) 12``; empty texts where there is none."""
    match = _CHOICE.fullmatch(_WRAPPED.sub(r"\1", text).strip())
    return (match[1] or match[2] or match[4], (match[3] or "").strip()) if match else ("", "")


def same_words(gold: str, answer: str) -> bool | None:
    """Letters alone are words, no products, if one side has two in a wrapper, three without one, or is ``no``."""
    (gold_words, gold_sure), (answer_words, answer_sure) = _words(gold), _words(answer)
    return gold_words == answer_words if gold_words and answer_words and (gold_sure or answer_sure) else None


def _words(text: str) -> tuple[set[str], bool]:
    """The words of a text without order, and whether they are words by themselves. Digits may follow: ``June 20``."""
    least = 2 if "\\text{" in text else 3
    separators = "[ .'()-]" if least == 2 else " "
    entries = _ENTRIES.split(_WRAPPED.sub(r"\1", text))
    words = {word for entry in entries if (word := re.sub(separators, "", entry).casefold())}
    sure = words == {"no"} or any(re.match(f"[a-z]{{{least}}}", word) for word in words)
    plain = all(word.isalpha() or (sure and word[0].isalpha() and word.isalnum()) for word in words)
    return (words, sure) if plain else (set(), False)


def same_numeral(gold: str, answer: str) -> bool | None:
    """A numeral with a base: the same digits, and the same base unless one side leaves it out."""
    (gold_digits, gold_base), (answer_digits, answer_base) = _numeral(gold), _numeral(answer)
    if not gold_base and not answer_base:
        return None
    return gold_digits == answer_digits and ("" in (gold_base, answer_base) or gold_base == answer_base)


def _numeral(text: str) -> tuple[str, str]:
    match = _NUMERAL.fullmatch(re.sub("[(){} ]", "", _WRAPPED.sub(r"\1", text)))
    base = _BASES.get(match[2], match[2]) if match else ""
    if match and base.isdigit() and all(int(digit, 16) < int(base) for digit in match[1]):
        return match[1].lstrip("0"), base
    return text.lstrip("0"), ""


def same_structure(gold: str, answer: str) -> bool | None:
    """Wrong where math-verify does not look: a set for a tuple, inequalities with ``and`` for ones with ``or``."""
    kinds = [(bool(_SET.fullmatch(text)), bool(_TUPLE.fullmatch(text))) for text in (gold, answer)]
    if sorted(kinds) == [(False, True), (True, False)]:
        return False
    joined = [set(_JOINED.findall(text)) for text in (gold, answer) if _INEQUALITY.search(text)]
    return False if len(joined) == 2 and all(joined) and joined[0] != joined[1] else None


def same_number(gold: str, answer: str) -> bool | None:
    """Plain numbers. Two decimals may differ by a rounding, on which math-verify decides; a whole number is exact."""
    if not NUMBER.fullmatch(gold) or not NUMBER.fullmatch(answer):
        return None
    numbers = [Decimal(re.sub("[, ]", "", text)) for text in (gold, answer)]
    return numbers[0] == numbers[1] if numbers[0] == numbers[1] or "." not in gold or "." not in answer else None


COMPARISONS = (same_text, same_label, same_words, same_numeral, same_structure)  # in order, after same_choice
