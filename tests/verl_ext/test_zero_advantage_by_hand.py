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

from grail_advantage.verl_ext.exchange import DealtRow, deal, nested, spread
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.verl_ext.zero_advantage import spread_in_mini_batches, trains, without_zero_advantage

PROMPTS, RESPONSES = (3, 2, 4, 1), (4, 3, 5, 2)
GROUP = object()


def mini_batch(advantages: list[list[float]], **settings: Any) -> Any:
    """Responses with tokens 100, 101, ... and 200, 201, ...; the last token of the last response is a tool's."""
    masks = [torch.ones(length, dtype=torch.int64) for length in RESPONSES]
    masks[3][1] = 0

    def values(start: int, lengths: Any) -> Any:
        return nested([torch.arange(length) + start * (row + 1) for row, length in enumerate(lengths)])

    whole = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    columns = {
        "prompts": values(100, PROMPTS),
        "responses": values(200, RESPONSES),
        "input_ids": values(1000, whole),
        "position_ids": nested([torch.arange(length) for length in whole]),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
        "old_log_probs": nested([-torch.ones(length) for length in RESPONSES]),
        "advantages": nested([torch.tensor(of_row) for of_row in advantages]),
    }
    return tu.get_tensordict(columns, non_tensor_dict=settings)


def leave_out(
    monkeypatch: pytest.MonkeyPatch, data: Any, other_rank: list[int], *, dynamic: bool = False, rows: int = 4
) -> tuple[Any, list[int]]:
    """The responses that are left on this rank, of two; and the lengths that it tells the other one."""
    told: list[int] = []

    def all_gather_object(found: list, own: list[int], group: object) -> None:
        assert group is GROUP and len(found) == 2
        told.extend(own)
        found[:] = [own, other_rank]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {GROUP: 2}[group])
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    settings = SimpleNamespace(use_dynamic_bsz=dynamic, micro_batch_size_per_gpu=rows)
    engine = SimpleNamespace(engine_config=settings, get_data_parallel_group=lambda: GROUP)
    return without_zero_advantage(engine, data), told


def lists(kept: Any, name: str) -> list[list]:
    return [of_row.tolist() for of_row in kept[name].unbind()]


def setting(kept: Any, name: str) -> Any:
    return tu.get_non_tensor_data(kept, name, default=None)


ADVANTAGES = [[0.0, -1.0, 0.0, 0.0], [0.0] * 3, [0.0, 0.0, 0.0, 0.0, 2.0], [0.0, 5.0]]


def test_rows_and_fillers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses 0 and 2 train. The other rank has five: micro-batches of at most four become two of three, so four fillers."""
    kept, told = leave_out(monkeypatch, mini_batch(ADVANTAGES), [10, 11, 12, 13, 14])
    assert told == [3 + 4, 4 + 5]
    assert setting(kept, "global_token_num") == [7, 9, 2, 2, 2, 2, 10, 11, 12, 13, 14, 2]
    assert setting(kept, "micro_batch_size_per_gpu") == 3
    assert lists(kept, "prompts") == [[100, 101, 102], [300, 301, 302, 303], *[[100]] * 4]
    assert lists(kept, "responses") == [[200, 201, 202, 203], [600, 601, 602, 603, 604], *[[0]] * 4]
    assert lists(kept, "input_ids") == [list(range(1000, 1007)), list(range(3000, 3009)), *[[1000, 1001]] * 4]
    assert lists(kept, "position_ids") == [list(range(7)), list(range(9)), *[[0, 1]] * 4]
    assert lists(kept, "response_mask") == [[1] * 4, [1] * 5, *[[0]] * 4]
    assert lists(kept, "old_log_probs") == [[-1.0] * 4, [-1.0] * 5, *[[0.0]] * 4]
    assert lists(kept, "advantages") == [ADVANTAGES[0], ADVANTAGES[2], *[[0.0]] * 4]
    assert kept["loss_mask"].tolist() == [13, 0, 0, 0, 0, 0], "the sum over the whole mini-batch"


def test_a_token_budget_needs_no_even_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's own settings count before the engine's."""
    dynamic = mini_batch(ADVANTAGES, use_dynamic_bsz=True, micro_batch_size_per_gpu=2)
    kept, _ = leave_out(monkeypatch, dynamic, [7, 7, 7], dynamic=False)
    assert len(kept) == 3 and setting(kept, "micro_batch_size_per_gpu") == 2
    fixed = mini_batch(ADVANTAGES, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    kept, _ = leave_out(monkeypatch, fixed, [7, 7, 7], dynamic=True)
    assert len(kept) == 4 and setting(kept, "micro_batch_size_per_gpu") == 2
    kept, _ = leave_out(monkeypatch, mini_batch(ADVANTAGES), [7, 7, 7], dynamic=True)
    assert len(kept) == 3 and setting(kept, "micro_batch_size_per_gpu") is None


def test_a_mini_batch_without_an_advantage_keeps_one_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, told = leave_out(monkeypatch, mini_batch([[0.0] * length for length in RESPONSES]), [])
    assert told == [] and len(kept) == 1 and setting(kept, "global_token_num") == [2, 2]
    assert lists(kept, "response_mask") == lists(kept, "responses") == [[0]]
    assert lists(kept, "advantages") == [[0.0]] and kept["loss_mask"].tolist() == [13]


def test_a_mini_batch_whose_every_token_trains_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mini_batch([[1.0] * length for length in RESPONSES])
    kept, told = leave_out(monkeypatch, data, [9], rows=3)
    assert kept is data and told == [7, 5, 9, 3]
    assert setting(kept, "global_token_num") == [7, 5, 9, 3, 9, 2, 2, 2]
    assert setting(kept, "micro_batch_size_per_gpu") == 2


def test_every_rank_gets_its_share_of_a_mini_batchs_rows() -> None:
    # Mini-batches of four responses on two ranks: responses 0, 1 and 4, 5; then 2, 3 and 6, 7. In the first, 0 and 1 train.
    order = spread_in_mini_batches([10, 20, 30, 40, 0, 0, 0, 0], [0, 1, 3], 2, 4)
    assert {*order[:2]} & {0, 1} and {*order[4:6]} & {0, 1} and {*order[:2], *order[4:6]} == {0, 1, 4, 5}
    assert {*order[2:4], *order[6:]} == {2, 3, 6, 7}
    # Responses 0, 1 and 2 train: 30 tokens a rank, where the shortest other response fills up.
    order = spread_in_mini_batches([10, 20, 30, 0, 0, 0], [0, 1, 2], 2, 6)
    assert [{*order[:3]} & {0, 1, 2}, {*order[3:]} & {0, 1, 2}] in ([{0, 1}, {2}], [{2}, {0, 1}])


def test_which_responses_train() -> None:
    advantages = [torch.tensor(row) for row in ([0.0, -0.0, 0.0], [1.0, 0.0, -1e-30, 0.0], [0.0, 2.0])]
    masks = [torch.tensor(row) for row in ([1, 1, 1], [1, 1, 1, 1], [1, 0])]
    assert trains(advantages, masks) == [False, True, False]


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
