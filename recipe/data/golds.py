r"""Checks of ground truths: does the reward function take each for itself, in plain spellings, and not for a near miss?

A ground truth that fails cannot be rewarded as it should: ``\frac{3}{4}`` has to accept ``0.75`` and refuse ``\frac{3}{5}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from grail_advantage.reward import compute_score

_INTEGER = re.compile(r"-?[0-9]{1,3}(?:,?[0-9]{3})+(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(?P<sign>-?)(?:\\[dt]?frac\{(?P<p>[0-9]+)\}\{(?P<q>[0-9]+)\}|(?P<r>[0-9]+)/(?P<s>[0-9]+))")
_LIST = re.compile(r"(?P<open>\\\{|[(\[]|)(?P<entries>[^()\[\]]*,[^()\[\]]*?)(?P<close>\\\}|[)\]]|)")
_EXPRESSION = re.compile(r"[-+*/^{}() 0-9A-Za-z.!]*(?:\\(?:[dt]?frac|sqrt|pi|cdot)[-+*/^{}() 0-9A-Za-z.!]*)*")


def spellings(gold: str) -> Iterator[str]:
    """Texts that state the same answer."""
    yield from (gold, f" {gold} ", f"${gold}$")
    if _INTEGER.fullmatch(gold):
        whole, point, decimals = gold.replace(",", "").partition(".")
        for separator in ("", ",", "{,}", "\\,"):
            yield f"{int(whole):,}".replace(",", separator) + point + decimals
    if (match := _FRACTION.fullmatch(gold)) and (bottom := int(match["q"] or match["s"])):
        value = Fraction(int(match["p"] or match["r"]), bottom)
        if 10**6 % value.denominator == 0:
            yield f"{match['sign']}{value.numerator * (10**6 // value.denominator) / 10**6:.6f}".rstrip("0").rstrip(".")


def near_misses(gold: str) -> Iterator[str]:
    """Texts that state another answer: another last digit, the other sign, a list without its last entry."""
    if digits := list(re.finditer("[0-9]", gold)):
        at = digits[-1].start()
        yield f"{gold[:at]}{(int(gold[at]) + 1) % 10}{gold[at + 1 :]}"
    if _EXPRESSION.fullmatch(gold) and re.search("[1-9]", gold):
        yield gold[1:] if re.fullmatch("-[^-+ ]*", gold) else f"-({gold})"
    if (match := _LIST.fullmatch(gold)) and not _INTEGER.fullmatch(gold):
        entries = [entry.strip() for entry in match["entries"].split(",")]
        if entries[-1] not in entries[:-1]:
            yield f"{match['open']}{', '.join(entries[:-1])}{match['close']}"


def faults(gold: str) -> list[str]:
    """The reasons why a ground truth is not judged as it should be; none if it is."""
    found = []
    for wanted, texts in ((1.0, spellings(gold)), (0.0, near_misses(gold))):
        for text in dict.fromkeys(texts):
            result = compute_score("", f"\\boxed{{{text}}}", gold)
            if result["score"] != wanted:
                verdict = (
                    "accepts" if result["score"] else "has no verdict on" if result["verify_failed"] else "refuses"
                )
                found.append(f"{verdict} {text!r}")
    return found


def check_golds(golds: Sequence[str]) -> dict[str, list[str]]:
    """The :func:`faults` of those ground truths that have some."""
    different = list(dict.fromkeys(golds))
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        return {gold: found for gold, found in zip(different, executor.map(faults, different), strict=True) if found}
