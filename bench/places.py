"""Places: is the first wrong token blamed, and its step? Within each incorrect response whose first error is known.

A token's blame is ``-A_t``: a method that gives the first error a large *positive* advantage finds nothing. The figures, of the
blame over the tokens of the response, ties counting half:

- ``token``: AUROC of the first wrong token against all others.
- ``alike``: the same against the tokens of its kind alone (result digits against result digits), so that a method that tells
  results from filler gains nothing.
- ``step``: AUROC of the tokens of the first wrong step against the other tokens.
- ``hit``: how often the most blamed token is the first wrong one; ``hit_step``: how often it is in the first wrong step.

Each is beside its control (``_shuffled``), the mean over shuffles of the method's own values within the response, with the
difference (``_gain``).

Shape suffixes: T response tokens.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from bench.methods import SHUFFLES, all_shuffled
from bench.policy import Label, SampledBatch
from bench.statistics import Estimate, auroc, largest_is, mean_of

FIGURES = {
    "token": "AUROC, first wrong token",
    "alike": "AUROC, among its kind",
    "step": "AUROC, first wrong step",
    "hit": "most blamed is the first wrong token",
    "hit_step": "most blamed is in the first wrong step",
}


def of_response(values_T: np.ndarray, label: Label) -> dict[str, float]:
    """The figures of one response's blame (T,); nan where one has no tokens to compare."""
    first_T = np.arange(len(values_T)) == label.token
    return {
        "token": auroc(values_T, first_T),
        "alike": auroc(values_T[label.alike_T], first_T[label.alike_T]),
        "step": auroc(values_T, label.step_T),
        "hit": largest_is(values_T, first_T),
        "hit_step": largest_is(values_T, label.step_T),
    }


def measure(
    batch: SampledBatch, advantages_BL: torch.Tensor, seed: int, shuffles: int = SHUFFLES
) -> dict[str, Estimate]:
    """The figures of a method's token advantages with their controls, means over the problems' means."""
    known = [
        (row, label)
        for row, (label, advantage) in enumerate(zip(batch.labels, batch.advantages_B.tolist(), strict=True))
        if label is not None and advantage != 0
    ]
    own: dict[str, list[float]] = defaultdict(list)
    for row, label in known:
        values_T = -batch.response(row, advantages_BL)
        for name, value in of_response(values_T, label).items():
            own[name].append(value)
    control: dict[str, list[list[float]]] = {name: [[] for _ in known] for name in FIGURES}
    for shuffled_BL in all_shuffled(batch, advantages_BL, shuffles, seed):
        for index, (row, label) in enumerate(known):
            for name, value in of_response(-batch.response(row, shuffled_BL), label).items():
                control[name][index].append(value)
    for name in FIGURES:
        own[f"{name}_shuffled"] = [float(np.mean(values)) for values in control[name]]
        own[f"{name}_gain"] = [a - b for a, b in zip(own[name], own[f"{name}_shuffled"], strict=True)]
    clusters = [int(batch.groups_B[row]) for row, _ in known]
    return {name: mean_of(values, clusters) for name, values in own.items()}
