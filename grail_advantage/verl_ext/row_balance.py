"""Sharing rows out to the data-parallel ranks: as many to each, and about as much work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


class Place(NamedTuple):
    """A row's place in the order in which rows go to the ranks, one rank's after the other's."""

    row: int
    original: bool
    """``False``: a copy that fills up a rank, whose result nobody reads."""


def deal(costs: Sequence[int], ranks: int, groups: Sequence[int] | None = None) -> list[Place]:
    """Order in which rows go to the ranks. Where their number does not divide evenly, copies of the cheapest row fill up.

    Args:
        costs: relative cost of each row; at least one row.
        ranks: number of ranks.
        groups: for each row the number of its group, where the rows of a group must meet on one rank.
    """
    cheapest = min(range(len(costs)), key=lambda row: costs[row])
    if groups is None:
        places = [Place(row, True) for row in range(len(costs))]
        places += [Place(cheapest, False)] * (-len(costs) % ranks)
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
        for place in [*(Place(row, True) for row in share), *[Place(cheapest, False)] * (most - len(share))]
    ]


def spread(lengths: Sequence[int], selected: Sequence[int], ranks: int, rows: Sequence[int] | None = None) -> list[int]:
    """Order of rows in which every rank gets its share of the selected ones, and of the others.

    A rank with more selected rows than the others would keep them waiting. Where the number does not divide evenly, the
    shortest other rows fill up.

    Args:
        lengths: tokens of each row of the batch.
        selected: rows that cost more.
        ranks: number of ranks.
        rows: these rows of the batch, or all; their number divides evenly.
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
