"""How responses are shared out to the data-parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from grail_advantage.verl_ext.exchange import DealtRow, deal, spread
from grail_advantage.verl_ext.patches import data_parallel_size


class TestSpread:
    """The order in which the trainer hands a batch to the ranks."""

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_every_rank_gets_its_share_of_the_rows_and_of_the_selected_ones(self, data: st.DataObject) -> None:
        data_parallel = data.draw(st.sampled_from([1, 2, 4]))
        each = data.draw(st.integers(1, 6))
        count = each * data_parallel
        lengths = data.draw(st.lists(st.integers(1, 4000), min_size=count, max_size=count))
        selected = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
        order = spread(lengths, selected, data_parallel)
        assert sorted(order) == list(range(count))
        of_rank = [
            sum(row in set(selected) for row in order[rank * each : (rank + 1) * each]) for rank in range(data_parallel)
        ]
        assert max(of_rank) == -(-len(selected) // data_parallel)
        fill = {row for rank in range(data_parallel) for row in order[rank * each :][: max(of_rank)]} - set(selected)
        left = set(range(count)) - set(selected) - fill
        assert max((lengths[row] for row in fill), default=0) <= min((lengths[row] for row in left), default=4000)


def _of_rank(order: list[DealtRow], ranks: int) -> list[list[DealtRow]]:
    assert len(order) % ranks == 0
    each = len(order) // ranks
    return [order[rank * each : (rank + 1) * each] for rank in range(ranks)]


class TestDeal:
    """The order in which responses that go through a pass of their own reach the ranks."""

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(1, 5))
    def test_every_row_goes_once_and_the_cheapest_fills_up(self, costs: list[int], ranks: int) -> None:
        order = deal(costs, ranks)
        assert len(order) == -(-len(costs) // ranks) * ranks
        assert sorted(place.row for place in order if place.original) == list(range(len(costs)))
        assert {costs[place.row] for place in order if not place.original} <= {min(costs)}

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5)), min_size=1, max_size=20), st.integers(1, 5))
    def test_the_rows_of_a_group_meet_on_one_rank(self, rows: list[tuple[int, int]], ranks: int) -> None:
        costs, groups = [list(column) for column in zip(*rows, strict=True)]
        shares = _of_rank(deal(costs, ranks, groups), ranks)
        own = [[place.row for place in share if place.original] for share in shares]
        assert sorted(row for share in own for row in share) == list(range(len(costs)))
        assert all(sum(any(groups[row] == group for row in share) for share in own) == 1 for group in set(groups))
        # No rank gets copies only so that another gets fewer responses: the longest share has none.
        assert any(len(share) == len(whole) for share, whole in zip(own, shares, strict=True))
        # Nor more work than an even share and a group.
        work = [sum(costs[row] for row in share) for share in own]
        largest = max(sum(cost for cost, group in rows if group == of) for of in groups)
        assert max(work) <= sum(costs) / ranks + largest


def test_a_sequence_parallel_group_counts_once() -> None:
    assert data_parallel_size(SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})) == 2
