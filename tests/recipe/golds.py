r"""Checks of ground truths: does the reward function take each for itself, as plain numbers are spelt, and not for a
near miss? ``10,080`` has to accept ``10{,}080`` and refuse ``10,081``; otherwise it cannot be rewarded as it should."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq

from grail_advantage.reward import compute_score

_NUMBER = re.compile(r"-?[0-9]{1,3}(?:,?[0-9]{3})+(?:\.[0-9]+)?")


def faults(gold: str) -> list[str]:
    """The reasons why a ground truth is not judged as it should be; none if it is."""
    texts = dict.fromkeys([gold, f" {gold} ", f"${gold}$"], True)
    if _NUMBER.fullmatch(gold):
        integer, point, decimals = gold.replace(",", "").partition(".")
        # 10080, 10,080, 10{,}080 and 10\,080 are one number.
        for mark in ("", ",", "{,}", "\\,"):
            texts[f"{int(integer):,}".replace(",", mark) + point + decimals] = True
    if match := re.fullmatch("(.*)([0-9])([^0-9]*)", gold, re.DOTALL):
        # Another last digit.
        texts[f"{match[1]}{(int(match[2]) + 1) % 10}{match[3]}"] = False
    reasons = []
    for text, expected in texts.items():
        if compute_score("", f"\\boxed{{{text}}}", gold)["score"] != expected:
            reasons.append(f"{'refuses' if expected else 'accepts'} {text!r}")
    return reasons


# FILE is one of scripts/prepare_data.sh; a ground truth in LaTeX takes 0.1 s.
if __name__ == "__main__":
    rows = pq.read_table(sys.argv[1])["reward_model"].to_pylist()
    golds = dict.fromkeys(row["ground_truth"] for row in rows)
    # The verifier's own processes do the work.
    with ThreadPoolExecutor(8) as executor:
        for gold, reasons in zip(golds, executor.map(faults, golds), strict=True):
            if reasons:
                print(f"{gold}: {', '.join(reasons)}")
