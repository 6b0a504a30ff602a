"""How responses are shared out to the data-parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from grail_advantage.verl_ext.exchange import deal, deal_mini_batches
from grail_advantage.verl_ext.patches import data_parallel_size

RANKS = st.integers(1, 5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), RANKS)
def test_every_rank_gets_as_many_and_about_as_much_work(costs: list[int], ranks: int) -> None:
    shares = deal(costs, ranks)
    counts, work = [len(share) for share in shares], [sum(costs[row] for row in share) for share in shares]
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert max(counts) - min(counts) <= 1
    assert max(work) - min(work) <= max(costs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5)), min_size=1, max_size=20), RANKS)
def test_the_rows_of_a_group_meet_on_one_rank(rows: list[tuple[int, int]], ranks: int) -> None:
    costs, groups = [list(column) for column in zip(*rows, strict=True)]
    shares = deal(costs, ranks, groups)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert all(sum(any(groups[row] == group for row in share) for share in shares) == 1 for group in set(groups))
    # No rank has more work than an even share and a group.
    largest = max(sum(cost for cost, group in rows if group == of) for of in groups)
    assert max(sum(costs[row] for row in share) for share in shares) <= sum(costs) / ranks + largest


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_rank_keeps_its_share_of_each_mini_batchs_rows_that_train(data: st.DataObject) -> None:
    ranks, share, batches = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 4)), 2
    count = ranks * share * batches
    costs = data.draw(st.lists(st.sampled_from([0, 0, 5, 300, 4000]), min_size=count, max_size=count))
    order = deal_mini_batches(costs, ranks, ranks * share)
    assert sorted(order) == list(range(count))
    for start in range(0, share * batches, share):
        places = [rank * share * batches + start + place for rank in range(ranks) for place in range(share)]
        dealt = [order[place] for place in places]
        assert sorted(dealt) == places
        trains = [sum(costs[row] > 0 for row in dealt[at : at + share]) for at in range(0, len(dealt), share)]
        assert max(trains) - min(trains) <= 1


def test_a_sequence_parallel_group_counts_once() -> None:
    assert data_parallel_size(SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})) == 2
