r"""Checks of ground truths: does the reward function take each for itself, in plain spellings, and not for a near miss?
``\frac{3}{4}`` has to accept ``0.75`` and refuse ``\frac{3}{5}``; otherwise it cannot be rewarded as it should."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq

from grail_advantage.reward import compute_score

_NUMBER = re.compile(r"-?[0-9]{1,3}(?:,?[0-9]{3})+(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
_LIST = re.compile(r"(\\\{|[(\[]|)([^()\[\]]*),[^()\[\],]*?(\\\}|[)\]]|)")


def spellings(gold: str) -> Iterator[str]:
    """Texts that state the same answer."""
    yield from (gold, f" {gold} ", f"${gold}$")
    if _NUMBER.fullmatch(gold):
        whole, point, decimals = gold.replace(",", "").partition(".")
        yield from (f"{int(whole):,}".replace(",", mark) + point + decimals for mark in ("", ",", "{,}", "\\,"))
    if (match := _FRACTION.fullmatch(gold)) and (bottom := int(match[3] or match[5])) and 10**6 % bottom == 0:
        yield f"{match[1]}{int(match[2] or match[4]) / bottom:.6f}"


def near_misses(gold: str) -> Iterator[str]:
    """Texts that state another answer: another last digit, a list without its last entry."""
    if match := re.fullmatch("(.*)([0-9])([^0-9]*)", gold, re.DOTALL):
        yield f"{match[1]}{(int(match[2]) + 1) % 10}{match[3]}"
    if (match := _LIST.fullmatch(gold)) and not _NUMBER.fullmatch(gold):
        *others, last = (entry.strip() for entry in gold[match.end(1) : match.start(3)].split(","))
        if last not in others:
            yield f"{match[1]}{', '.join(others)}{match[3]}"


def faults(gold: str) -> list[str]:
    """The reasons why a ground truth is not judged as it should be; none if it is."""
    return [
        f"{'refuses' if wanted else 'accepts'} {text!r}"
        for wanted, texts in ((1.0, spellings(gold)), (0.0, near_misses(gold)))
        for text in dict.fromkeys(texts)
        if compute_score("", f"\\boxed{{{text}}}", gold)["score"] != wanted
    ]


if __name__ == "__main__":  # FILE of scripts/prepare_data.sh; in LaTeX each takes 0.1 s
    golds = dict.fromkeys(row["ground_truth"] for row in pq.read_table(sys.argv[1])["reward_model"].to_pylist())
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        for gold, reasons in zip(golds, executor.map(faults, golds), strict=True):
            print(*([f"{gold}: {', '.join(reasons)}\n"] if reasons else []), end="")
