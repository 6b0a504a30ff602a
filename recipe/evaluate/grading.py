"""Samples graded: is the last ``\\boxed{...}`` of each the ground truth?"""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pandas as pd
from pebble import ProcessPool

from recipe.evaluate.sampling import KEY
from recipe.reward import compute_score

BOX = "\\boxed{"
METRICS = ["acc", "pass", "tokens", "unanswered", "truncated"]
BOTH, PUBLISHED = "both", ["acc, published", "pass, published"]
"""The grader that gives ``reward``'s verdicts and, as metrics beside them, the published ones."""


def by_reward(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in training."""
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        return list(executor.map(compute_score, samples["benchmark"], samples["text"], samples["gold"]))


def as_published(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in the code published with GRAIL (``src/eval/eval_results_base.py``): math-verify reads both between dollar signs,
    without cleaning. A response is untrusted text, so other processes read it, with limits."""
    memory = (resource.RLIMIT_AS, (4 << 30, 4 << 30))
    golds = [published_gold(*each) for each in zip(samples["benchmark"], samples["gold"], strict=True)]
    with ProcessPool(initializer=resource.setrlimit, initargs=memory, context=get_context("spawn")) as pool:
        futures = [pool.schedule(_published, x, timeout=30) for x in zip(samples["text"], golds, strict=True)]
        lost = {"score": False, "answer_found": True, "verify_failed": True, "pred": ""}
        return [lost if future.exception() else future.result() for future in futures]


def published_gold(benchmark: str, gold: str) -> str:
    """What the published code makes of a ground truth: the ``str`` of what its file holds.

    OlympiadBench's holds a list, AMC23's a float.
    """
    if benchmark == "olympiadbench":
        return str([gold])
    return str(float(gold)) if benchmark == "amc23" and gold.removeprefix("-").isdigit() else gold


def published_box(text: str) -> str | None:
    """The last box as the published code finds it: every brace counts, and one that does not close ends the search."""
    found, at = None, text.find(BOX)
    while at >= 0:
        start = end = at + len(BOX)
        depth = 1
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            break
        found, at = text[start : end - 1], text.find(BOX, end)
    return found


def _published(text: str, gold: str) -> dict[str, Any]:
    from math_verify import parse, verify

    answer = published_box(text)
    right = answer is not None and verify(parse(f"${gold}$"), parse(f"${answer}$"))
    return {"score": right, "answer_found": answer is not None, "verify_failed": False, "pred": (answer or "")[:128]}


GRADERS = {"reward": by_reward, "published": as_published}
"""By the name of ``--grader``; they give verdicts as :func:`grail_advantage.reward.compute_score` does."""


def grade(samples: pd.DataFrame, grader: str) -> pd.DataFrame:
    """Grade samples (with ``gold``, the ground truth) by one of :data:`GRADERS`, or :data:`BOTH`. ``answered``: there is a
    complete box, with the text ``answer``. ``no_verdict``: it cannot be read within the verifier's limits; the sample counts as
    incorrect."""
    if grader == BOTH:
        return grade(samples, "reward").assign(right_published=grade(samples, "published")["right"])
    verdicts = pd.DataFrame(GRADERS[grader](samples), index=samples.index)
    names = {"score": "right", "answer_found": "answered", "verify_failed": "no_verdict"}
    scores = samples[[*KEY, "tokens", "gold"]].join(verdicts[[*names]].astype(bool).rename(columns=names))
    return scores.assign(truncated=samples["finish_reason"] == "length", answer=verdicts["pred"])


def by_problem(scores: pd.DataFrame) -> pd.DataFrame:
    """The :data:`METRICS` of each problem's samples, by ``benchmark`` and ``index``: shares, but for ``tokens``, a mean; with
    :data:`BOTH` graders :data:`PUBLISHED` too."""
    names = {"right": "acc", "tokens": "tokens", "unanswered": "unanswered", "truncated": "truncated"}
    names |= {"right_published": PUBLISHED[0]} if "right_published" in scores else {}
    scores = scores.assign(unanswered=~scores["answered"]).rename(columns=names)
    means = scores.groupby(["benchmark", "index"], sort=False)[[*names.values()]].mean()
    passed = {name.replace("acc", "pass"): means[name] > 0 for name in names.values() if name.startswith("acc")}
    return means.assign(**passed)[METRICS + (PUBLISHED if PUBLISHED[0] in means else [])].astype(float)


def tokens_of_answered(scores: pd.DataFrame) -> pd.Series:
    """The mean number of tokens of the responses with a box, by benchmark, which is what the published code reports."""
    return scores[scores["answered"]].groupby("benchmark")["tokens"].mean().reindex(scores["benchmark"].unique())
