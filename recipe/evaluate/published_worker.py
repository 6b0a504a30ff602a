"""Grades as the code published with GRAIL (``src/eval/eval_results_base.py``), math-verify without cleaning: a list of
``[benchmark, text, gold]`` comes in as JSON, one of verdicts as ``compute_score`` gives them goes out. A response is
untrusted text, read by workers with limits, which are forked from a process without torch (3 GB mapped with CUDA)."""

import json
import resource
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import regex
from math_verify import parse, verify
from pebble import ProcessPool

# that a worker may map beyond what this process has; that a comparison may take
MEMORY = 1 << 30
SECONDS = 30
BOX = regex.compile(r"\\boxed\{(?P<inside>(?:[^{}]++|\{(?&inside)\})*+)(?P<brace>\}?)")


def published_gold(benchmark: str, gold: str) -> str:
    """Returns ``str`` of what the file of the published code holds: a list for OlympiadBench, a float for AMC23."""
    if benchmark == "olympiadbench":
        return str([gold])
    if benchmark == "amc23" and gold.removeprefix("-").isdigit():
        return str(float(gold))
    return gold


def published_box(text: str) -> str | None:
    """Returns the last box as the published code finds it: every brace counts, and one that does not close ends the
    search."""
    box = None
    for match in BOX.finditer(text):
        if not match["brace"]:
            break
        box = match["inside"]
    return box


def judge(gold: str, answer: str | None) -> bool:
    """Returns whether math-verify finds the two equal, read between dollar signs."""
    return answer is not None and bool(verify(parse(f"${gold}$"), parse(f"${answer}$")))


if __name__ == "__main__":
    # Loads half of sympy, once.
    judge("\\frac{1}{2}", "0.5")
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    # The workers inherit the limit, which may be lower already.
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    graded = []
    with ProcessPool(context=get_context("fork")) as pool:
        pending = []
        for benchmark, text, gold in json.load(sys.stdin):
            pair = (published_gold(benchmark, gold), published_box(text))
            pending.append((pair[1], pool.schedule(judge, pair, timeout=SECONDS)))
        for box, future in pending:
            verdict = None if future.exception() else future.result()
            graded.append(
                {
                    "score": verdict,
                    "answer_found": box is not None,
                    "verify_failed": verdict is None,
                    "pred": (box or "")[:128],
                }
            )
    print(json.dumps(graded))
