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
    """Grade samples (with ``gold``, the ground truth) by one of :data:`GRADERS`. ``answered``: there is a complete box, with
    the text ``answer``. ``no_verdict``: it cannot be read within the verifier's limits; the sample counts as incorrect."""
    verdicts = pd.DataFrame(GRADERS[grader](samples), index=samples.index)
    names = {"score": "right", "answer_found": "answered", "verify_failed": "no_verdict"}
    scores = samples[[*KEY, "tokens", "gold"]].join(verdicts[[*names]].astype(bool).rename(columns=names))
    return scores.assign(truncated=samples["finish_reason"] == "length", answer=verdicts["pred"])


def by_problem(scores: pd.DataFrame) -> pd.DataFrame:
    """The :data:`METRICS` of each problem's samples, by ``benchmark`` and ``index``: shares, but for ``tokens``, a mean."""
    scores = scores.assign(acc=scores["right"], unanswered=~scores["answered"])
    means = scores.groupby(["benchmark", "index"], sort=False)[["acc", "tokens", "unanswered", "truncated"]].mean()
    return means.assign(**{"pass": means["acc"] > 0})[METRICS].astype(float)
