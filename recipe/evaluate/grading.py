"""Samples graded: is the last ``\\boxed{...}`` of each the ground truth?"""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pandas as pd
from pebble import ProcessPool

from recipe.evaluate.sampling import KEY
from recipe.reward import compute_score, last_boxed

METRICS = ["acc", "pass", "tokens", "unanswered", "truncated"]
BOTH, PUBLISHED = "both", ["acc, published", "pass, published"]
"""The grader that gives ``reward``'s verdicts and, as metrics beside them, the published ones."""


def by_reward(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in training."""
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        return list(executor.map(compute_score, samples["benchmark"], samples["text"], samples["gold"]))


def as_published(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in the code published with GRAIL: math-verify reads both between dollar signs, without cleaning. A response is
    untrusted text, so other processes read it, with limits."""
    memory = (resource.RLIMIT_AS, (4 << 30, 4 << 30))
    with ProcessPool(initializer=resource.setrlimit, initargs=memory, context=get_context("spawn")) as pool:
        futures = [pool.schedule(_published, x, timeout=30) for x in zip(samples["text"], samples["gold"], strict=True)]
        lost = {"score": False, "answer_found": True, "verify_failed": True, "pred": ""}
        return [lost if future.exception() else future.result() for future in futures]


def _published(text: str, gold: str) -> dict[str, Any]:
    from math_verify import parse, verify

    answer = last_boxed(text)
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
