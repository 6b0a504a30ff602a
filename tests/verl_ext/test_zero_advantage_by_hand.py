"""How responses are shared out to the data-parallel ranks; and how zero-advantage responses leave a mini-batch: the responses,
lengths and settings that are left, on two ranks, by hand."""

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu

from grail_advantage.verl_ext.exchange import deal_mini_batches, without_zero_advantage
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.weigh import deal
from tests.verl_ext.engines import batch_of
from tests.verl_ext.ranks import response

LENGTHS = ((3, 4), (2, 3), (4, 5), (1, 2))
"""Tokens of prompt and response."""
GROUP = object()


def mini_batch(advantages: Sequence[Sequence[float]], **settings):
    """Responses with tokens 200, 201, ... after prompts of 100, 101, ...; the last token of the last response is a tool's."""
    rows = []
    for number, (prompt, count) in enumerate(LENGTHS):
        ids = [
            100 * (1 + number) + torch.arange(prompt),
            200 * (1 + number) + torch.arange(count),
        ]
        rows.append(response(*ids, advantages=torch.tensor(advantages[number])))
    rows[3]["response_mask"][1] = 0
    return batch_of(rows, **settings)


@pytest.fixture
def leave_out(monkeypatch):
    """The responses that are left on this rank, of two; and the lengths that it tells the other one."""

    def run(data, other_rank, *, dynamic=False, rows=4):
        sent = []

        def all_gather_object(gathered, lengths, group):
            assert group is GROUP and len(gathered) == 2
            sent.extend(lengths)
            gathered[:] = [lengths, other_rank]

        monkeypatch.setattr(torch.distributed, "get_world_size", {GROUP: 2}.__getitem__)
        monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
        config = SimpleNamespace(use_dynamic_bsz=dynamic, micro_batch_size_per_gpu=rows)
        engine = SimpleNamespace(
            engine_config=config, get_data_parallel_group=lambda: GROUP
        )
        return without_zero_advantage(engine, data), sent

    return run


def lists(batch, name: str) -> list[list]:
    return [values.tolist() for values in batch[name].unbind()]


ADVANTAGES = [[0.0, -1.0, 0.0, 0.0], [0.0] * 3, [0.0, 0.0, 0.0, 0.0, 2.0], [0.0, 5.0]]


def test_rows_and_fillers(leave_out):
    """Responses 0 and 2 train: the advantage of response 3 is a tool's.
    The other rank has five: micro-batches of at most four become two of three, so four fillers."""
    batch, sent = leave_out(mini_batch(ADVANTAGES), [10, 11, 12, 13, 14])
    # Prompt and response of 0 and of 2.
    assert sent == [3 + 4, 4 + 5]
    assert tu.get(batch, "global_token_num") == [7, 9, 2, 2, 2, 2, 10, 11, 12, 13, 14, 2]
    assert tu.get(batch, "micro_batch_size_per_gpu") == 3
    # Of each field: that of response 0, of response 2, and of a filler.
    columns = {
        "prompts": ([100, 101, 102], [300, 301, 302, 303], [100]),
        "responses": ([200, 201, 202, 203], [600, 601, 602, 603, 604], [0]),
        "input_ids": (
            [100, 101, 102, 200, 201, 202, 203],
            [300, 301, 302, 303, 600, 601, 602, 603, 604],
            [100, 101],
        ),
        "position_ids": (list(range(7)), list(range(9)), [0, 1]),
        "response_mask": ([1] * 4, [1] * 5, [0]),
        "advantages": (ADVANTAGES[0], ADVANTAGES[2], [0.0]),
    }
    for name, (first, second, filler) in columns.items():
        assert lists(batch, name) == [first, second, *[filler] * 4], name
    assert batch["loss_mask"].tolist() == [13, 0, 0, 0, 0, 0], (
        "the sum over the whole mini-batch"
    )


@pytest.mark.parametrize(
    ("settings", "dynamic", "count", "size"),
    [
        ({"use_dynamic_bsz": True, "micro_batch_size_per_gpu": 2}, False, 3, 2),
        # Three responses in micro-batches of two need a filler.
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, True, 4, 2),
        ({}, True, 3, None),
    ],
)
def test_a_token_budget_needs_no_even_micro_batches(
    settings, dynamic, count, size, leave_out
):
    """The batch's own settings count before the engine's."""
    batch, _ = leave_out(mini_batch(ADVANTAGES, **settings), [7, 7, 7], dynamic=dynamic)
    assert len(batch) == count and tu.get(batch, "micro_batch_size_per_gpu") == size


def test_a_mini_batch_whose_every_token_trains_stays(leave_out):
    data = mini_batch([[1.0] * count for _, count in LENGTHS])
    batch, sent = leave_out(data, [9], rows=3)
    assert sent == [7, 5, 9, 3] and lists(batch, "input_ids") == lists(data, "input_ids")
    assert tu.get(batch, "global_token_num") == [7, 5, 9, 3, 9, 2, 2, 2]
    # Two micro-batches of at most three become two of two.
    assert tu.get(batch, "micro_batch_size_per_gpu") == 2


RANKS = st.integers(1, 5)
COSTS = st.integers(1, 4000)


@settings(max_examples=100, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=40), RANKS)
def test_every_rank_gets_as_many_and_about_as_much_work(costs, ranks):
    shares = deal(costs, ranks)
    counts = list(map(len, shares))
    work = [sum(costs[row] for row in share) for share in shares]
    assert sorted(chain(*shares)) == list(range(len(costs)))
    assert max(counts) - min(counts) <= 1
    assert max(work) - min(work) <= max(costs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(COSTS, st.integers(0, 5)), min_size=1, max_size=20), RANKS)
def test_the_rows_of_a_group_meet_on_one_rank(rows, ranks):
    costs, groups = map(list, zip(*rows, strict=True))
    shares = deal(costs, ranks, groups)
    assert sorted(chain(*shares)) == list(range(len(costs)))
    # A group that is on two ranks is counted twice.
    on_ranks = [{groups[row] for row in share} for share in shares]
    assert sum(map(len, on_ranks)) == len(set(groups))
    # No rank has more work than an even share and a group.
    largest = max(sum(cost for cost, group in rows if group == number) for number in groups)
    assert (
        max(sum(costs[row] for row in share) for share in shares)
        <= sum(costs) / ranks + largest
    )


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_every_rank_keeps_its_share_of_each_mini_batchs_rows_that_train(data, ranks, share):
    """In two mini-batches, of so many rows a rank."""
    count = 2 * share * ranks
    costs = data.draw(
        st.lists(st.sampled_from([0, 5, 4000]), min_size=count, max_size=count)
    )
    order = deal_mini_batches(costs, ranks, ranks * share)
    # (rank, mini-batch, place): verl gives each rank a part of the batch, which its mini-batches take in turn.
    places = np.arange(count).reshape(ranks, 2, share)
    for number in (0, 1):
        dealt = np.array(order)[places[:, number]]
        # A mini-batch keeps its responses.
        assert sorted(dealt.flat) == sorted(places[:, number].flat)
        trained = (np.array(costs)[dealt] > 0).sum(axis=1)
        assert trained.max() - trained.min() <= 1


def test_a_sequence_parallel_group_counts_once():
    assert data_parallel_size(SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})) == 2
