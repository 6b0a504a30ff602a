"""Responses on their way between trainer and workers: their order over the ranks, the request of a pass, its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from grail_advantage.data import Row, RowScores
from grail_advantage.method import Method

PLACES = "receipt_places"
"""Field of a batch of R responses: (R, 2) int64. Column 0 is a response's place in the update's batch, column 1 its slot
among those that the token dump writes, -1 for none."""
WATCHED = "receipt_update"  # setting of a batch whose update is watched: a number that tells updates apart
UPDATE, FORWARD, PADDED_FORWARD = "actor update", "old log-probabilities", "old log-probabilities, padded"
"""Layouts: whose micro-batches they are; the first in training mode, the last padded where the run packs."""


def deal(costs: Sequence[int], ranks: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """The responses of each rank, by relative costs: about as many, and about as much work. Their numbers differ by one
    at most, but for ``groups``, of which those with the same number meet on one rank."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(range(len(costs)) if groups is None else groups):
        members.setdefault(group, []).append(row)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for cost, rows in sorted(((sum(costs[row] for row in of), of) for of in members.values()), reverse=True):
        rank = min(range(ranks), key=lambda rank: (len(shares[rank]), work[rank]))
        shares[rank] += rows
        work[rank] += cost
    return [sorted(share) for share in shares]


def build_request(
    rows: Sequence[Row], method: Method, *, temperature: float, step: int = 0, pad_token: int | None = None
) -> TensorDict:
    """Responses for :func:`grail_advantage.verl_ext.worker.token_scores`, with the tokenizer's ``pad_token``."""
    settings = {"signal": method, "temperature": temperature, "step": step, "pad_token": pad_token}
    return tu.get_tensordict({"rows": [replace(row, example=None) for row in rows]}, non_tensor_dict=settings)


def build_reply(rows: Sequence[RowScores]) -> TensorDict:
    """The scores of the responses of a request, float32 on the CPU, with the gradient norms of a pass with gradients."""
    norms = [None if row.norms is None else row.norms.cpu() for row in rows]
    return tu.get_tensordict(
        {"rows": [RowScores(row.scores.float().cpu(), of) for row, of in zip(rows, norms, strict=True)]}
    )


def rows_of(data: TensorDict) -> list[Any]:
    """The responses of a request, or the scores of a reply."""
    return list(tu.get(data, "rows"))


def nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of different lengths as one, as verl's TensorDicts hold them."""
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
