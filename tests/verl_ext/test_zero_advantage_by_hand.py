"""How responses are shared out to the data-parallel ranks; and how zero-advantage responses leave a mini-batch: the responses,
lengths and settings that are left, on two ranks, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu

from grail_advantage.verl_ext.exchange import (
    deal_mini_batches,
    nested,
    trains,
    without_zero_advantage,
)
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.weigh import deal

PROMPTS = (3, 2, 4, 1)
RESPONSES = (4, 3, 5, 2)
GROUP = object()


def mini_batch(advantages: list[list[float]], **settings: Any) -> Any:
    """Responses with tokens 100, 101, ... and 200, 201, ...; the last token of the last response is a tool's."""
    masks = [torch.ones(length, dtype=torch.int64) for length in RESPONSES]
    masks[3][1] = 0

    def values(start: int, lengths: Any) -> Any:
        return nested(
            [torch.arange(length) + start * (row + 1) for row, length in enumerate(lengths)]
        )

    totals = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    columns = {
        "prompts": values(100, PROMPTS),
        "responses": values(200, RESPONSES),
        "input_ids": values(1000, totals),
        "position_ids": nested([torch.arange(length) for length in totals]),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
        "old_log_probs": nested([-torch.ones(length) for length in RESPONSES]),
        "advantages": nested([torch.tensor(of_row) for of_row in advantages]),
    }
    return tu.get_tensordict(columns, non_tensor_dict=settings)


def leave_out(
    monkeypatch: pytest.MonkeyPatch,
    data: Any,
    other_rank: list[int],
    *,
    dynamic: bool = False,
    rows: int = 4,
) -> tuple[Any, list[int]]:
    """The responses that are left on this rank, of two; and the lengths that it tells the other one."""
    sent: list[int] = []

    def all_gather_object(gathered: list, lengths: list[int], group: object) -> None:
        assert group is GROUP and len(gathered) == 2
        sent.extend(lengths)
        gathered[:] = [lengths, other_rank]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {GROUP: 2}[group])
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    settings = SimpleNamespace(use_dynamic_bsz=dynamic, micro_batch_size_per_gpu=rows)
    engine = SimpleNamespace(engine_config=settings, get_data_parallel_group=lambda: GROUP)
    return without_zero_advantage(engine, data), sent


def lists(batch: Any, name: str) -> list[list]:
    return [of_row.tolist() for of_row in batch[name].unbind()]


def setting(batch: Any, name: str) -> Any:
    return tu.get_non_tensor_data(batch, name, default=None)


ADVANTAGES = [[0.0, -1.0, 0.0, 0.0], [0.0] * 3, [0.0, 0.0, 0.0, 0.0, 2.0], [0.0, 5.0]]


def test_rows_and_fillers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses 0 and 2 train. The other rank has five: micro-batches of at most four become two of three, so four fillers."""
    batch, sent = leave_out(monkeypatch, mini_batch(ADVANTAGES), [10, 11, 12, 13, 14])
    assert sent == [3 + 4, 4 + 5]
    assert setting(batch, "global_token_num") == [7, 9, 2, 2, 2, 2, 10, 11, 12, 13, 14, 2]
    assert setting(batch, "micro_batch_size_per_gpu") == 3
    assert lists(batch, "prompts") == [[100, 101, 102], [300, 301, 302, 303], *[[100]] * 4]
    assert lists(batch, "responses") == [
        [200, 201, 202, 203],
        [600, 601, 602, 603, 604],
        *[[0]] * 4,
    ]
    assert lists(batch, "input_ids") == [
        list(range(1000, 1007)),
        list(range(3000, 3009)),
        *[[1000, 1001]] * 4,
    ]
    assert lists(batch, "position_ids") == [list(range(7)), list(range(9)), *[[0, 1]] * 4]
    assert lists(batch, "response_mask") == [[1] * 4, [1] * 5, *[[0]] * 4]
    assert lists(batch, "old_log_probs") == [[-1.0] * 4, [-1.0] * 5, *[[0.0]] * 4]
    assert lists(batch, "advantages") == [ADVANTAGES[0], ADVANTAGES[2], *[[0.0]] * 4]
    assert batch["loss_mask"].tolist() == [13, 0, 0, 0, 0, 0], "the sum over the whole mini-batch"


def test_a_token_budget_needs_no_even_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's own settings count before the engine's."""
    dynamic = mini_batch(ADVANTAGES, use_dynamic_bsz=True, micro_batch_size_per_gpu=2)
    batch, _ = leave_out(monkeypatch, dynamic, [7, 7, 7], dynamic=False)
    assert len(batch) == 3 and setting(batch, "micro_batch_size_per_gpu") == 2
    fixed = mini_batch(ADVANTAGES, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    batch, _ = leave_out(monkeypatch, fixed, [7, 7, 7], dynamic=True)
    assert len(batch) == 4 and setting(batch, "micro_batch_size_per_gpu") == 2
    batch, _ = leave_out(monkeypatch, mini_batch(ADVANTAGES), [7, 7, 7], dynamic=True)
    assert len(batch) == 3 and setting(batch, "micro_batch_size_per_gpu") is None


def test_a_mini_batch_without_an_advantage_keeps_one_filler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, sent = leave_out(monkeypatch, mini_batch([[0.0] * length for length in RESPONSES]), [])
    assert sent == [] and len(batch) == 1 and setting(batch, "global_token_num") == [2, 2]
    assert lists(batch, "response_mask") == lists(batch, "responses") == [[0]]
    assert lists(batch, "advantages") == [[0.0]] and batch["loss_mask"].tolist() == [13]


def test_a_mini_batch_whose_every_token_trains_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mini_batch([[1.0] * length for length in RESPONSES])
    batch, sent = leave_out(monkeypatch, data, [9], rows=3)
    assert batch is data and sent == [7, 5, 9, 3]
    assert setting(batch, "global_token_num") == [7, 5, 9, 3, 9, 2, 2, 2]
    assert setting(batch, "micro_batch_size_per_gpu") == 2


def test_which_responses_train() -> None:
    advantages = [
        torch.tensor(row) for row in ([0.0, -0.0, 0.0], [1.0, 0.0, -1e-30, 0.0], [0.0, 2.0])
    ]
    masks = [torch.tensor(row) for row in ([1, 1, 1], [1, 1, 1, 1], [1, 0])]
    assert trains(advantages, masks) == [False, True, False]


RANKS = st.integers(1, 5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), RANKS)
def test_every_rank_gets_as_many_and_about_as_much_work(costs: list[int], ranks: int) -> None:
    shares = deal(costs, ranks)
    counts = [len(share) for share in shares]
    work = [sum(costs[row] for row in share) for share in shares]
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert max(counts) - min(counts) <= 1
    assert max(work) - min(work) <= max(costs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5)), min_size=1, max_size=20), RANKS)
def test_the_rows_of_a_group_meet_on_one_rank(rows: list[tuple[int, int]], ranks: int) -> None:
    costs, groups = [list(column) for column in zip(*rows, strict=True)]
    shares = deal(costs, ranks, groups)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert all(
        sum(any(groups[row] == group for row in share) for share in shares) == 1
        for group in set(groups)
    )
    # No rank has more work than an even share and a group.
    largest = max(sum(cost for cost, group in rows if group == number) for number in groups)
    assert max(sum(costs[row] for row in share) for share in shares) <= sum(costs) / ranks + largest


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_rank_keeps_its_share_of_each_mini_batchs_rows_that_train(
    data: st.DataObject,
) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    share = data.draw(st.integers(1, 4))
    batches = 2
    count = ranks * share * batches
    costs = data.draw(
        st.lists(st.sampled_from([0, 0, 5, 300, 4000]), min_size=count, max_size=count)
    )
    order = deal_mini_batches(costs, ranks, ranks * share)
    assert sorted(order) == list(range(count))
    for start in range(0, share * batches, share):
        places = [
            rank * share * batches + start + place
            for rank in range(ranks)
            for place in range(share)
        ]
        dealt = [order[place] for place in places]
        assert sorted(dealt) == places
        trains = [
            sum(costs[row] > 0 for row in dealt[at : at + share])
            for at in range(0, len(dealt), share)
        ]
        assert max(trains) - min(trains) <= 1


def test_a_sequence_parallel_group_counts_once() -> None:
    assert data_parallel_size(SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})) == 2
