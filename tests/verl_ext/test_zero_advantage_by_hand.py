"""Zero-advantage responses leave a mini-batch: the responses, lengths and settings that are left, on two ranks, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from grail_advantage.verl_ext.exchange import nested
from grail_advantage.verl_ext.rules import SKIPPABLE
from grail_advantage.verl_ext.zero_advantage import spread_in_mini_batches, trains, without_zero_advantage
from tests.verl_ext.ranks import AGGREGATIONS

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


LENGTHS, TRAINED = torch.tensor([9, 12, 8, 10, 14]), torch.tensor([9, 0, 4, 0, 7])
"""Tokens of responses, and how many of them have an advantage."""


def gradient(loss: str, aggregation: str, rows: list[int]) -> torch.Tensor:
    """Of one of verl's losses, at each log-probability of these responses; it is divided by the whole batch."""
    generator, place = torch.Generator().manual_seed(0), torch.arange(int(LENGTHS.max()))
    log_prob, noise, advantages, weights = torch.randn(4, len(LENGTHS), len(place), generator=generator)[:, rows]
    log_prob = (-log_prob.abs()).requires_grad_()
    options = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "kl_cov_ratio": 0.2, "dro_beta": 0.1}
    settings = PolicyLossConfig(loss_mode=loss, **options)
    if loss == "bypass_mode":
        correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
        object.__setattr__(settings, "rollout_correction", correction)
    options = {"strategy": "fsdp2", "rollout_n": 2, "use_dynamic_bsz": True}
    actor = FSDPActorConfig(loss_agg_mode=aggregation, policy_loss=settings, **options)
    sizes = {"dp_size": 1, "batch_num_tokens": int(LENGTHS.sum()), "global_batch_size": len(LENGTHS)}
    actor.global_batch_info.update(loss_scale_factor=20, **sizes)
    torch.manual_seed(0)
    value, _ = get_policy_loss_fn(loss)(
        old_log_prob=log_prob.detach() + 0.3 * noise,
        log_prob=log_prob,
        advantages=torch.where(place < TRAINED[rows, None], advantages, 0.0),
        response_mask=place < LENGTHS[rows, None],
        loss_agg_mode=aggregation,
        config=actor,
        rollout_is_weights=weights.abs(),
    )
    value.backward()
    return torch.zeros(len(LENGTHS), len(place)).index_copy(0, torch.tensor(rows), log_prob.grad)


@pytest.mark.parametrize("loss", POLICY_LOSS_REGISTRY)
def test_losses_that_do_without_responses_that_have_no_advantage_are_let_through(loss: str) -> None:
    for aggregation in AGGREGATIONS if loss in SKIPPABLE else AGGREGATIONS[:1]:
        expected = gradient(loss, aggregation, list(range(len(LENGTHS))))
        found = gradient(loss, aggregation, TRAINED.nonzero().flatten().tolist())
        assert (expected[0] != 0).any()
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8) == (loss in SKIPPABLE), aggregation
