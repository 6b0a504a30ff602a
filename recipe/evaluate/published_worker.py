"""The process that compares answers as the code published with GRAIL does: reads the JSON list of ``[gold, answer]``
and writes the list of verdicts, null where there is none. A response is untrusted text, so that workers with limits
read it. They are forked from this process, which has no torch, whose CUDA build alone maps 3 GB."""

import json
import resource
import sys
from contextlib import suppress
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
    with suppress(ValueError):  # lower already
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    judge("\\frac{1}{2}", "0.5")  # loads half of sympy, once
    with ProcessPool(initializer=confine, context=get_context("fork")) as pool:
        futures = [pool.schedule(judge, pair, timeout=SECONDS) for pair in json.load(sys.stdin)]
        print(json.dumps([None if future.exception() else future.result() for future in futures]))
