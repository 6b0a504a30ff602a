"""Samples graded: is the last ``\\boxed{...}`` of each the ground truth?"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from grail_advantage.reward import compute_score
from recipe.evaluate.sampling import KEY

BOX = "\\boxed{"
METRICS = ["acc", "pass", "tokens", "unanswered", "truncated"]
BOTH, PUBLISHED = "both", ["acc, published", "pass, published"]
"""The grader that gives ``reward``'s verdicts and, as metrics beside them, the published ones."""
_WORKER = str(Path(__file__).with_name("published_worker.py"))


def by_reward(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in training."""
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        return list(executor.map(compute_score, samples["benchmark"], samples["text"], samples["gold"]))


def as_published(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in the code published with GRAIL (``src/eval/eval_results_base.py``): math-verify reads both between dollar signs,
    without cleaning. A response is untrusted text, so other processes read it, with limits."""
    answers = list(map(published_box, samples["text"]))
    golds = map(published_gold, samples["benchmark"], samples["gold"])
    pairs = json.dumps(list(zip(golds, answers, strict=True)))
    process = subprocess.run(
        [sys.executable, "-P", _WORKER], input=pairs, stdout=subprocess.PIPE, text=True, check=True
    )
    return [
        {
            "score": bool(verdict),
            "answer_found": answer is not None,
            "verify_failed": verdict is None,
            "pred": (answer or "")[:128],
        }
        for verdict, answer in zip(json.loads(process.stdout.splitlines()[-1]), answers, strict=True)
    ]


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


GRADERS = {"reward": by_reward, "published": as_published}
"""By the name of ``--grader``; they give verdicts as :func:`grail_advantage.reward.compute_score` does."""


def grade(samples: pd.DataFrame, grader: str) -> pd.DataFrame:
    """Grade samples (with ``gold``, the ground truth) by one of :data:`GRADERS`, or :data:`BOTH`. ``answered``: there is a
    complete box, with the text ``answer``. ``no_verdict``: it cannot be read within the verifier's limits; the sample counts as
    incorrect."""
    if grader == BOTH:
        published = grade(samples, "published")[["right", "no_verdict"]]
        return grade(samples, "reward").join(published.add_suffix("_published"))
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
