r"""Comparisons of two answers in normal form: the table :data:`COMPARISONS`, whose rows are tried in order.

A row returns a verdict, or None, which leaves both texts to the next row, or two other texts, which take their place.
ValueError: there is no verdict. math-verify would multiply or collect the parts of an answer: it reads ``3:4:5`` as a
quotient, ``2\text{ hours }15\text{ minutes}`` as a product, ``x=5, y=-1`` as the set of 5 and -1, and ``1, 1, 3`` as the
set of 1 and 3. The last two rows put tuples in their place, which it compares part by part.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from typing import NamedTuple, TypeAlias

import regex

from grail_advantage.reward._normal import TO, WORDS
from grail_advantage.reward._words import fold, singular, words_of

Verdict: TypeAlias = bool | tuple[str, ...] | None

_WRAPPED = re.compile(r"\\text\{([^{}]*)\}")
_NUMERAL = re.compile(r"(?:[A-Za-z]=)?([0-9A-F]+)_?(?:_|base)([1-9][0-9]?|[a-z]+)")
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_BASES = {"sixteen": "16"} | {word: str(base) for base, word in enumerate(_WORDS.split())}
_IDLE_BLANK = re.compile("(?<![0-9]) | (?![0-9])")
_SURELY_WORDS = re.compile(r"\\text\{[^{}]*[A-Za-z]{2}|^[^{}]*[A-Za-z]{3}|^[nN][oO]$")
_ENTRIES = re.compile(r"[,;]|\b(?:and|or)\b")
_JOINED_NUMBERS = re.compile(
    r"(?:[A-Za-z] ?= ?|[vV]\.? ?)?\+?"
    r"((?:\([0-9]+\)[ -]*)?[0-9]+(?: ?\\?%)?(?:(?: ?-{1,3} ?|[./:])[0-9]+(?: ?\\?%)?)+)"
)
# In joined numbers, which have no question mark: no difference, quotient or product is written so.
_NO_NUMBER = re.compile(r"^[^?]*(?:[0-9]/[0-9]+/|\.[0-9]+\.|(?<![0-9.:])0[0-9])")
_LABEL = re.compile(rf"^[^/?]*-[^/?]*$|{_NO_NUMBER.pattern}")
_VALUE = r"(?:[A-Za-z] ?= ?)?[-+]? ?(?:\\frac|[0-9./{}% \\]|[,;] ?[-+]?)+"

UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(rf"[+-]? ?{UNSIGNED}")
_FRACTION = rf"\\frac ?\{{ ?-? ?{UNSIGNED} ?\}} ?\{{ ?{UNSIGNED} ?\}}"
# A number or a fraction of two.
PLAIN = re.compile(rf"[+-]? ?(?:{UNSIGNED}|{_FRACTION}|{UNSIGNED} ?/ ?{UNSIGNED})")
# Between entries; nothing inside brackets separates.
_SEPARATOR = regex.compile(
    r"(?P<brackets>\\?[({\[](?:\\[^{}]|[^\\(){}\[\]]|(?&brackets))*+\\?[)}\]])(*SKIP)(*FAIL)"
    r"|[,;]|\\text\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z])"
)
_TEXT = regex.compile(r"(?<!_ ?\{? ?)\\text\{([^{}]*)\}(?! ?=)")
_NAMED = re.compile(
    r"((?:\\?[A-Za-z]+|\\text\{[^{}]*\})(?: ?_ ?(?:\w|\{[^{}]*\}))?(?:\([^()]*\))?) ?= ?([^=]+)"
)
_CLOCK = re.compile(r"[0-9]{1,2}(?::[0-5][0-9]){1,2}")


def same_number(gold: str, answer: str) -> bool | None:
    """Compares plain numbers. Two decimals may differ by a rounding, on which math-verify decides; a whole number is exact."""
    if not NUMBER.fullmatch(gold) or not NUMBER.fullmatch(answer):
        return None
    first, second = (Decimal(re.sub("[, ]", "", text)) for text in (gold, answer))
    if first != second and "." in gold and "." in answer:
        return None
    return first == second


class Part(NamedTuple):
    """A part of a list, between commas, ``and`` or ``or``: a value, and the words or the name beside it."""

    key: tuple[str, ...]
    value: str


def choices(gold: str, answer: str) -> Verdict:
    """The letter of a choice decides, unless both have text after it. Beside another text, also that of the same choice, a
    choice is the text after its letter."""
    gold_letter, gold_rest = _choice(gold)
    answer_letter, answer_rest = _choice(answer)
    # In brackets it is no variable, so that its case does not matter.
    if gold == f"({gold_letter})":
        answer_letter = answer_letter or answer.strip("()").upper()
    has_letters = gold_letter and answer_letter
    if has_letters and not (gold_letter == answer_letter and gold_rest and answer_rest):
        return gold_letter == answer_letter
    return gold_rest or gold, answer_rest or answer


def _choice(text: str) -> tuple[str, str]:
    """Returns ``("B", "12")`` of ``(B) 12``; empty texts where there is none."""
    match = re.fullmatch(
        r"(?:\(([A-J])\)|([A-J])(?:\)|[.:](?= )| -(?= .*[A-Za-z]{3}))) ?(.+)|\(?([A-J])\)?[.:)]?",
        _WRAPPED.sub(r"\1", text).strip(),
    )
    if match is None:
        return "", ""
    return match[1] or match[2] or match[4], (match[3] or "").strip()


def same_text(gold: str, answer: str) -> Verdict:
    """The same text is right, whether or not anything can read it; blanks count between digits alone."""
    return _IDLE_BLANK.sub("", gold) == _IDLE_BLANK.sub("", answer) or None


def same_label(gold: str, answer: str) -> Verdict:
    """Dates, ranges, scores, numbers of telephones and versions are texts, and no values: ``5-3`` is not ``3-1``.
    Beside them a number is wrong: ``2`` for ``5-3``. The other way round ``5-3`` may be a difference that nobody
    computed, but ``2024-01-05`` and ``1.2.3`` are none."""
    golds = _labels(gold)
    answers = _labels(answer)
    if (
        all(map(_LABEL.search, golds))
        and re.fullmatch(_VALUE, answer)
        and not any(map(_LABEL.search, answers))
    ):
        return False
    labels = golds + answers
    if not all(map(_LABEL.search, labels)) and not any(map(_NO_NUMBER.search, labels)):
        return None
    # In brackets the order counts.
    arranged = list if gold.startswith("(") and answer.startswith("(") else sorted
    return arranged(map(_date, golds)) == arranged(map(_date, answers))


def _date(label: str) -> str:
    """Returns ``2024-1-5`` for ``2024-01-05``; other labels stay."""
    return re.sub(r"(?<![0-9.:])0(?=[0-9](?![0-9]))", "", label)


def _labels(text: str) -> list[str]:
    """Returns the joined numbers of a list without blanks, %, and lengths of dashes; its other entries after a question
    mark."""
    outer = re.fullmatch(r"(?:\(|\[|\\\{)([^()\[\]{}]*?)(?:\)|\]|\\\})", text)
    labels = []
    for entry in _ENTRIES.split(outer[1] if outer else text):
        label = f"? {entry}"
        if match := _JOINED_NUMBERS.fullmatch(entry.strip()):
            with_one_dash = re.sub(r"\)[ -]*|-+ ?", "-", match[1])
            label = re.sub(r"[ (%\\]", "", with_one_dash)
        labels.append(label)
    return labels


def same_words(gold: str, answer: str) -> Verdict:
    """Letters alone are words, no products, if one side has two in a wrapper, three without one, or is ``no``. ValueError:
    one side has all words of the other, and more."""
    sides = (gold, answer)
    first, second = map(_words, sides)
    if not first or not second or not any(map(_SURELY_WORDS.search, sides)):
        return None
    gold_words, answer_words = (set(words_of(text.lower())) - {"and"} for text in sides)
    if gold_words < answer_words or answer_words < gold_words:
        raise ValueError("one answer has more words")
    return first == second


def _words(text: str) -> set[str]:
    """Returns the words of a list, each entry as one, without articles and plurals; none where there is anything
    else."""
    # $^ matches nothing: without a wrapper such a character is in no list of words.
    separators = "[.'()-]" if "\\text{" in text else "$^"
    bare = re.sub(r"\b(?:the|an?) (?=[a-z])", "", _WRAPPED.sub(r"\1", text))
    entries = (re.sub(separators, " ", entry).split() for entry in _ENTRIES.split(bare))
    words = {"".join(map(singular, entry)) for entry in entries if entry}
    return words if "".join(words).isalpha() else set()


def same_numeral(gold: str, answer: str) -> Verdict:
    """A numeral with a base: the same digits, and the same base unless the answer leaves it out. Beside a number without
    base it is its value. ValueError: then it has the number's digits, and the ground truth may have left out the base."""
    gold_digits, gold_base, gold_value = _numeral(gold)
    answer_digits, answer_base, answer_value = _numeral(answer)
    if gold_base:
        return gold_digits == answer_digits and answer_base in ("", gold_base)
    if not answer_base:
        return None
    if gold_digits == answer_digits and gold_value != answer_value:
        raise ValueError("the ground truth has no base")
    return gold_value == answer_value


def _numeral(text: str) -> tuple[str, str, str]:
    """Returns digits, base and value in base ten; a text that is no numeral, without a base."""
    match = _NUMERAL.fullmatch(re.sub("[(){} ]", "", _WRAPPED.sub(r"\1", text)))
    with suppress(ValueError):
        if match:
            base = _BASES.get(match[2], match[2])
            return match[1].lstrip("0"), base, str(int(match[1], int(base)))
    return text.lstrip("0"), "", text


def same_structure(gold: str, answer: str) -> Verdict:
    """A set is wrong for a tuple, and a tuple for a set, where math-verify does not look."""
    both_sorted = "\n".join(sorted((gold, answer)))  # a bracket sorts before a backslash
    differ = re.fullmatch(r"\([^()]*,[^()]*\)\n\\\{[^{}]*,[^{}]*\\\}", both_sorted)
    return False if differ else None


def ratios(gold: str, answer: str) -> Verdict:
    """``3:4:5`` is ``6:8:10``, and ``2:3`` is ``2\\text{ to }3``; times and ranges have no factor."""
    texts = (gold, answer)
    sides = [[part.strip() for part in re.split(rf":|{TO.pattern}", text)] for text in texts]
    lengths = {len(side) for side in sides}
    if lengths == {1} or any(re.search("[,;=<>]", text) for text in texts):
        return None
    if len(lengths) > 1:
        if lengths == {1, 2} and not any(map(TO.search, texts)):
            return None  # `2:3` is `\frac{2}{3}`
        raise ValueError("a ratio stands beside another answer")
    if all(map(_CLOCK.fullmatch, texts)) or not any(":" in text for text in texts):
        return tuple(map(_tuple, sides))
    # 3:4:5 is (4/3, 5/3).
    return tuple(_tuple(f"\\frac{{{part}}}{{{side[0]}}}" for part in side[1:]) for side in sides)


def keyed_parts(gold: str, answer: str) -> Verdict:
    """Quantities by their words and values by their names, in any order. A tuple may leave out names that are in the order
    of the alphabet, and a list those of the same order. Values without keys are a list in any order; repeats count."""
    sides = [_parts_of(gold), _parts_of(answer)]
    if not all(sides):
        return None
    gold_keys, answer_keys = (Counter(part.key for part in side) for side in sides)
    has_words = WORDS.search(gold) or WORDS.search(answer)
    if has_words and (
        gold_keys != answer_keys or ("or" in words_of(gold)) != ("or" in words_of(answer))
    ):
        raise ValueError("the words cannot be compared")
    if len(gold_keys) == 1 and gold_keys.keys() == answer_keys.keys():
        return _lists(*sides)
    if any(len(keys) > 1 and max(keys.values()) > 1 for keys in (gold_keys, answer_keys)):
        raise ValueError("a word or a name stands twice")
    if gold_keys == answer_keys:
        return _values(sorted(sides[0])), _values(sorted(sides[1]))
    if (() in gold_keys) == (() in answer_keys):
        raise ValueError("the names differ")
    named, nameless = sides if () in answer_keys else sides[::-1]
    names = [part.key[-1] for part in named]
    if len({name.split("_")[0] for name in names}) == 1:
        return _lists(*sides)
    if len(nameless) == 1 and nameless[0].value.startswith("("):
        nameless = _parts_of(nameless[0].value[1:-1])
        if "".join(sorted(names)) in string.ascii_lowercase:
            named.sort()
    return _values(named), _values(nameless)


def _tuple(values: Iterable[str]) -> str:
    return f"({', '.join(values)})"


def _values(parts: list[Part]) -> str:
    return _tuple(part.value for part in parts if part.value)


def _lists(*sides: list[Part]) -> Verdict:
    """Return both without their keys, and each entry with how often it is there if one is there twice."""
    counts = [Counter(part.value for part in side) for side in sides]
    if max(map(len, counts)) > 1 and any(count.total() > len(count) for count in counts):
        # 1, 1, 3 becomes (1,2), (3,1); as a set of values it would be 1, 3.
        return tuple(
            ", ".join(f"({value},{times})" for value, times in count.items()) for count in counts
        )
    if sides[0][0].key or sides[1][0].key:
        return tuple(map(", ".join, counts))
    return None


def _parts_of(text: str) -> list[Part]:
    """Returns the parts of a list, also those of ``2\\text{ hours }15\\text{ minutes}``. Words that begin, as in ``base
    6 height 4``, are of the number after them, else of the one before them."""
    parts = []
    for entry in _SEPARATOR.sub("\n", text).split("\n"):
        pieces = _TEXT.split(entry)  # a value, words, a value, ..., a value
        values = pieces[::2]
        words = [*pieces[1::2], ""]
        if len(values) > 1 and not values[0].strip():
            del values[0]
        for value, words_beside in zip(values, words, strict=False):
            key = tuple(fold(word) for word in words_of(words_beside) if word != "and")
            if key or value.strip():
                parts.append(Part(key, value.strip()))
    return _with_names(parts) if len(parts) > 1 else parts


def _with_names(parts: list[Part]) -> list[Part]:
    """Returns names as keys, if all values have one, or the one before: of 2, too, in ``x=1, 2``."""
    name = ""
    named = []
    for part in parts:
        value = part.value
        if match := _NAMED.fullmatch(value):
            name = match[1].strip()
            value = match[2].strip()
        if not name:
            return parts
        named.append(Part((*part.key, name), value))
    return named


COMPARISONS = (
    choices,
    same_text,
    same_label,
    same_words,
    same_numeral,
    same_structure,
    ratios,
    keyed_parts,
)
