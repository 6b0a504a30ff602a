"""Responses on their way between trainer and workers: their order over the ranks, the request of a pass, its reply.
Shape suffixes: R responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import Row, RowScores
from grail_advantage.method import Method

PLACES = "receipt_places"
"""Field of a batch: (R, 2) int64. Column 0 is a response's place in the update's batch, column 1 its slot among those
that the token dump writes, -1 for none."""
WATCHED = "receipt_update"  # setting of a batch whose update is watched: a number that tells updates apart
UPDATE, FORWARD, PADDED_FORWARD = "actor update", "old log-probabilities", "old log-probabilities, padded"
"""Layouts: whose micro-batches they are; the first in training mode, the last padded where the run packs."""


class DealtRow(NamedTuple):
    """A response's place in the order in which they go to the ranks, one rank's after the other's."""

    row: int
    original: bool  # else a copy that fills up a rank, whose result is dropped


def deal(costs: Sequence[int], ranks: int, groups: Sequence[int] | None = None) -> list[DealtRow]:
    """Order in which at least one response goes to the ranks, by relative costs. Where their number does not divide
    evenly, copies of the cheapest one fill up. Responses with the same number in ``groups`` meet on one rank."""
    cheapest = min(range(len(costs)), key=lambda row: costs[row])
    if groups is None:
        places = [DealtRow(row, True) for row in range(len(costs))]
        places += [DealtRow(cheapest, False)] * (-len(costs) % ranks)
        return [places[index] for share in _shares([costs[place.row] for place in places], ranks) for index in share]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for rows in sorted(members.values(), key=lambda rows: -sum(costs[row] for row in rows)):
        rank = work.index(min(work))
        shares[rank] += rows
        work[rank] += sum(costs[row] for row in rows)
    most = max(map(len, shares))
    filled = [
        [DealtRow(row, True) for row in share] + [DealtRow(cheapest, False)] * (most - len(share)) for share in shares
    ]
    return [place for share in filled for place in share]


def spread(lengths: Sequence[int], selected: Sequence[int], ranks: int, rows: Sequence[int] | None = None) -> list[int]:
    """Order of responses, all of the batch or ``rows``, in which every rank gets its share of the selected ones, and of
    the others. The number of all divides evenly; to the selected ones the shortest others are added until theirs does.
    """
    chosen = set(selected)
    rows = range(len(lengths)) if rows is None else rows
    others = sorted((row for row in rows if row not in chosen), key=lambda row: lengths[row])
    fill = -len(selected) % ranks

    def dealt(rows: list[int]) -> list[list[int]]:
        return [[rows[index] for index in share] for share in _shares([lengths[row] for row in rows], ranks)]

    shares = zip(dealt([*selected, *others[:fill]]), dealt(others[fill:]), strict=True)
    return [row for first, second in shares for row in (*first, *second)]


def _shares(costs: list[int], ranks: int) -> list[list[int]]:
    """As many indices for each rank, and about as much work; ``len(costs)`` divides evenly."""
    return get_seqlen_balanced_partitions(costs, ranks, equal_size=True) if costs else [[] for _ in range(ranks)]


def spread_in_mini_batches(
    lengths: Sequence[int], trained: Sequence[int], ranks: int, mini_batch_rows: int
) -> list[int]:
    """Order of a batch in which every rank gets its share of those of each mini-batch's responses that train.

    verl gives every rank an equal part of the batch, of which each mini-batch, of ``mini_batch_rows`` responses on all
    ranks together, takes the next ones, and keeps them.
    """
    of_rank, share, chosen = len(lengths) // ranks, mini_batch_rows // ranks, set(trained)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, of_rank, share):
        rows = [rank * of_rank + start + place for rank in range(ranks) for place in range(share)]
        order = spread(lengths, [row for row in rows if row in chosen], ranks, rows)
        for rank in range(ranks):
            shares[rank] += order[rank * share : (rank + 1) * share]
    return [row for of_one in shares for row in of_one]


def build_request(
    rows: Sequence[Row], method: Method, *, temperature: float, step: int = 0, pad_token: int | None = None
) -> TensorDict:
    """Responses for :func:`grail_advantage.verl_ext.worker.token_scores`, with the tokenizer's ``pad_token``: the nested
    ``input_ids``, a vector for each other part of a response, and the settings."""
    parts: dict[str, torch.Tensor] = {"input_ids": nested([row.tokens for row in rows])}
    parts |= {
        name: torch.tensor([getattr(row, name) for row in rows]) for name in ("start", "length", "group", "index")
    }
    parts["advantage"] = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
    parts["answer"] = torch.tensor([(-1,) * 4 if row.answer is None else astuple(row.answer) for row in rows])
    settings = {"signal": method, "temperature": temperature, "step": step, "pad_token": pad_token}
    return tu.get_tensordict(parts, non_tensor_dict=settings)


def rows_of(request: TensorDict) -> list[Row]:
    """The responses of a request."""
    names = ("start", "length", "answer", "advantage", "group", "index")
    parts = zip(request["input_ids"].unbind(), *(request[name].tolist() for name in names), strict=True)
    return [
        Row(tokens, start, length, AnswerSpan(*span) if span[0] >= 0 else None, advantage, group, index)
        for tokens, start, length, span, advantage, group, index in parts
    ]


def build_reply(rows: Sequence[RowScores]) -> TensorDict:
    """TensorDict of batch size R on the CPU with the nested float32 ``scores``, and the nested ``gradient_norm`` of a pass with
    gradients."""
    reply = {"scores": nested([row.scores.float().cpu() for row in rows])}
    if all(row.norms is not None for row in rows):
        reply["gradient_norm"] = nested([row.norms.cpu() for row in rows])
    return tu.get_tensordict(reply)


def nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of different lengths as one, as verl's TensorDicts hold them."""
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
