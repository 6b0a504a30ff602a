"""The process that compares answers as the code published with GRAIL does; ``recipe.evaluate.grading`` starts it as a script.

A response is untrusted text, so that workers with limits read it. They are forked from this process, which has neither
torch nor the command's main module: on a machine with CUDA torch alone maps 3 GB. It reads the JSON list of
``[gold, answer]`` and writes the list of verdicts: true, false, or null where there is none.
"""

import json
import resource
import sys
from multiprocessing import get_context
from pathlib import Path

from math_verify import parse, verify
from pebble import ProcessPool

MEMORY, SECONDS = 1 << 30, 30
"""Bytes that a worker may map beyond those that it starts with, as for the reward; and the time of a comparison."""


def judge(gold: str, answer: str | None) -> bool:
    """Whether math-verify finds the two equal, read between dollar signs without cleaning."""
    return answer is not None and bool(verify(parse(f"${gold}$"), parse(f"${answer}$")))


def confine() -> None:
    """Bound this worker's memory."""
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    judge("\\frac{1}{2}", "0.5")  # loads half of sympy, once
    with ProcessPool(initializer=confine, context=get_context("fork")) as pool:
        futures = [pool.schedule(judge, pair, timeout=SECONDS) for pair in json.load(sys.stdin)]
        print(json.dumps([None if future.exception() else future.result() for future in futures]))
