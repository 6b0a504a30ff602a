"""Samples graded: is the last ``\\boxed{...}`` of each the ground truth?"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from grail_advantage.reward import compute_score
from recipe.evaluate.sampling import KEY

BOX = "\\boxed{"
METRICS, PUBLISHED = ["acc", "pass", "tokens", "unanswered", "truncated"], ["acc, published", "pass, published"]
BOTH = "both"
"""The grader that gives ``reward``'s verdicts and, as metrics beside them, the published ones."""
WORKER = str(Path(__file__).with_name("published_worker.py"))


def by_reward(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in training."""
    with ThreadPoolExecutor(8) as executor:  # the verifier's own processes do the work
        return list(executor.map(compute_score, samples["benchmark"], samples["text"], samples["gold"]))


def as_published(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """As in the code published with GRAIL (``src/eval/eval_results_base.py``): math-verify without cleaning."""
    answers = [published_box(text) for text in samples["text"]]
    golds = map(published_gold, samples["benchmark"], samples["gold"])
    pairs, command = json.dumps(list(zip(golds, answers, strict=True))), [sys.executable, "-P", WORKER]
    said = subprocess.run(command, input=pairs, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [
        {"score": verdict, "answer_found": box is not None, "verify_failed": verdict is None, "pred": (box or "")[:128]}
        for verdict, box in zip(json.loads(said.splitlines()[-1]), answers, strict=True)
    ]


def published_gold(benchmark: str, gold: str) -> str:
    """``str`` of what the file of the published code holds: a list for OlympiadBench, a float for AMC23."""
    if benchmark == "olympiadbench":
        return str([gold])
    return str(float(gold)) if benchmark == "amc23" and gold.removeprefix("-").isdigit() else gold


def published_box(text: str) -> str | None:
    """The last box as the published code finds it: every brace counts, and one that does not close ends the search."""
    found, rest = None, text.partition(BOX)[2]
    while rest:
        depths = accumulate(({"{": 1, "}": -1}.get(char, 0) for char in rest), initial=1)
        if (length := next((place for place, depth in enumerate(depths) if depth == 0), None)) is None:
            break
        found, rest = rest[: length - 1], rest[length:].partition(BOX)[2]
    return found


GRADERS = {"reward": by_reward, "published": as_published}
"""By the name of ``--grader``; they give verdicts as :func:`grail_advantage.reward.compute_score` does."""


def grade(samples: pd.DataFrame, grader: str) -> pd.DataFrame:
    """Grade samples (with ``gold``, the ground truth) by one of :data:`GRADERS`, or :data:`BOTH`. ``answered``: there
    is a complete box, with the text ``answer``. ``no_verdict``: it is beyond the verifier's limits, and counts as
    incorrect."""
    if grader == BOTH:
        published = grade(samples, "published")[["right", "no_verdict"]]
        return grade(samples, "reward").join(published.add_suffix("_published"))
    verdicts = pd.DataFrame(GRADERS[grader](samples), index=samples.index)
    names = {"score": "right", "answer_found": "answered", "verify_failed": "no_verdict"}
    scores = samples[[*KEY, "tokens", "gold"]].join(verdicts[[*names]].astype(bool).rename(columns=names))
    return scores.assign(truncated=samples["finish_reason"] == "length", answer=verdicts["pred"])


def by_problem(scores: pd.DataFrame) -> pd.DataFrame:
    """The :data:`METRICS` of each problem's samples, by ``benchmark`` and ``index``: shares, but for ``tokens``, a
    mean."""
    metrics = [*METRICS, *(PUBLISHED if "right_published" in scores else [])]
    names = {"right": "acc", "right_published": PUBLISHED[0]}
    scores = scores.assign(unanswered=~scores["answered"]).rename(columns=names)
    means = scores.groupby(["benchmark", "index"], sort=False)[[*scores.columns.intersection(metrics)]].mean()
    passed = {name: means[name.replace("pass", "acc")] > 0 for name in metrics if name.startswith("pass")}
    return means.assign(**passed)[metrics].astype(float)
