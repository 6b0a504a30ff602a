"""Responses on their way between the trainer and the workers: their order over the ranks, the request of a pass, and its reply.

Shape suffixes: R responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import Row, RowScores
from grail_advantage.method import Method

NO_SPAN = (-1, -1, -1, -1)
PLACES = "receipt_places"
"""Field of a batch: (R, 2) int64. Column 0 is a response's place in the update's batch, column 1 its slot among those that the
token dump writes, -1 for none."""
WATCHED = "receipt_update"
"""Setting of a batch whose update is watched: a number that tells updates apart."""

UPDATE, FORWARD, PADDED_FORWARD = "actor update", "old log-probabilities", "old log-probabilities, padded"
"""Layouts that the model is probed in, by whose micro-batches they are."""


class DealtRow(NamedTuple):
    """A response's place in the order in which they go to the ranks, one rank's after the other's."""

    row: int
    original: bool
    """``False`` for a copy that fills up a rank; its result is dropped."""


def deal(costs: Sequence[int], ranks: int, groups: Sequence[int] | None = None) -> list[DealtRow]:
    """Order in which responses go to the ranks. Where their number does not divide evenly, copies of the cheapest one fill up.

    Args:
        costs: relative cost of each response; at least one response.
        ranks: number of ranks.
        groups: for each response the number of its group, where the responses of a group must meet on one rank.
    """
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
    return [
        place
        for share in shares
        for place in [*(DealtRow(row, True) for row in share), *[DealtRow(cheapest, False)] * (most - len(share))]
    ]


def spread(lengths: Sequence[int], selected: Sequence[int], ranks: int, rows: Sequence[int] | None = None) -> list[int]:
    """Order of responses in which every rank gets its share of the selected ones, and of the others.

    A rank with more selected responses than the others would keep them waiting. Where the number does not divide evenly, the
    shortest other responses fill up.

    Args:
        lengths: tokens of each response of the batch.
        selected: responses that cost more.
        ranks: number of ranks.
        rows: these responses of the batch, or all; their number divides evenly.
    """
    chosen = set(selected)
    rows = range(len(lengths)) if rows is None else rows
    others = sorted((row for row in rows if row not in chosen), key=lambda row: lengths[row])
    fill = -len(selected) % ranks

    def dealt(rows: list[int]) -> list[list[int]]:
        return [[rows[index] for index in share] for share in _shares([lengths[row] for row in rows], ranks)]

    shares = zip(dealt([*selected, *others[:fill]]), dealt(others[fill:]), strict=True)
    return [row for with_graph, without in shares for row in (*with_graph, *without)]


def _shares(costs: list[int], ranks: int) -> list[list[int]]:
    """As many indices for each rank, and about as much work; ``len(costs)`` divides evenly."""
    if not costs:
        return [[] for _ in range(ranks)]
    return get_seqlen_balanced_partitions(costs, ranks, equal_size=True)


def spread_in_mini_batches(
    lengths: Sequence[int], trained: Sequence[int], ranks: int, mini_batch_rows: int
) -> list[int]:
    """Order of a batch in which every rank gets its share of each mini-batch's responses that train.

    verl gives every rank an equal part of the batch, of which each mini-batch takes the next responses, and keeps them.

    Args:
        lengths: tokens of each response; their number divides evenly.
        trained: the responses that train.
        mini_batch_rows: responses of a mini-batch on all ranks together.
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
    rows: Sequence[Row], signal: Method, *, temperature: float, step: int = 0, pad_token: int | None = None
) -> TensorDict:
    """Responses for :func:`grail_advantage.verl_ext.worker.token_scores`.

    Args:
        pad_token: the tokenizer's.

    Returns:
        TensorDict of batch size R with the nested ``input_ids``, a vector for each other part of a response, and the settings.
    """
    return tu.get_tensordict(
        {
            "input_ids": nested([row.tokens for row in rows]),
            "start": torch.tensor([row.start for row in rows]),
            "length": torch.tensor([row.length for row in rows]),
            "answer": torch.tensor([_bounds(row.answer) for row in rows]),
            "advantage": torch.tensor([row.advantage for row in rows], dtype=torch.float64),
            "group": torch.tensor([row.group for row in rows]),
            "index": torch.tensor([row.index for row in rows]),
        },
        non_tensor_dict={"signal": signal, "temperature": temperature, "step": step, "pad_token": pad_token},
    )


def rows_of(request: TensorDict) -> list[Row]:
    """The responses of a request."""
    names = ("start", "length", "answer", "advantage", "group", "index")
    columns = zip(*(request[name].tolist() for name in names), strict=True)
    return [
        Row(tokens, start, length, AnswerSpan(*span) if span[0] >= 0 else None, advantage, group, index)
        for tokens, (start, length, span, advantage, group, index) in zip(
            request["input_ids"].unbind(), columns, strict=True
        )
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


def _bounds(span: AnswerSpan | None) -> tuple[int, int, int, int]:
    return (span.start, span.content_start, span.content_end, span.end) if span is not None else NO_SPAN
