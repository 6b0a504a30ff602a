"""When the old log-probabilities' forward serves the saliency backward too, and how rows are dealt to ranks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from grail_advantage.verl_ext import fusion
from grail_advantage.verl_ext.trainer import TokenWeightTrainerSync

OBSTACLES = {
    "another signal": ({"adv_estimator": "oar_g"}, "algorithm.adv_estimator=oar_g"),
    "bypass": ({"rollout_correction": {"bypass_mode": True}}, "algorithm.rollout_correction.bypass_mode=True"),
    "KL in the reward": ({"use_kl_in_reward": True}, "algorithm.use_kl_in_reward=True"),
}


def _config(**algorithm: Any) -> DictConfig:
    known = {"adv_estimator": "grail", "rollout_correction": {"bypass_mode": False}, "use_kl_in_reward": False}
    return OmegaConf.create({"algorithm": {**known, **algorithm}})


@pytest.mark.parametrize("choice", ["auto", True])
def test_shares_the_forward_where_nothing_is_in_the_way(choice: str | bool) -> None:
    config = _config(fuse_saliency_pass=choice)
    fusion.check_config(config)
    assert fusion.fuses(config)


def test_is_on_by_default() -> None:
    assert fusion.fuses(_config())
    assert fusion.fuses(_config(rollout_correction=None))


def test_can_be_switched_off() -> None:
    config = _config(fuse_saliency_pass=False)
    fusion.check_config(config)
    assert not fusion.fuses(config)


@pytest.mark.parametrize(("algorithm", "setting"), OBSTACLES.values(), ids=OBSTACLES)
def test_auto_runs_a_pass_of_its_own_where_sharing_is_not_exact(algorithm: dict, setting: str) -> None:
    config = _config(fuse_saliency_pass="auto", **algorithm)
    fusion.check_config(config)
    assert not fusion.fuses(config)


@pytest.mark.parametrize(("algorithm", "setting"), OBSTACLES.values(), ids=OBSTACLES)
def test_true_is_refused_where_sharing_is_not_exact(algorithm: dict, setting: str) -> None:
    with pytest.raises(
        ValueError, match=f"algorithm.fuse_saliency_pass=True does not work with {setting}: .*; use auto"
    ):
        fusion.check_config(_config(fuse_saliency_pass=True, **algorithm))


@pytest.mark.parametrize("choice", ["yes", 1, 0, None])
def test_refuses_other_values(choice: Any) -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.fuse_saliency_pass=.* is unknown; choose one of auto, true, false"
    ):
        fusion.check_config(_config(fuse_saliency_pass=choice))


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
        order = _trainer(data_parallel)._spread(lengths, selected)
        assert sorted(order) == list(range(count))
        of_rank = [
            sum(row in set(selected) for row in order[rank * each : (rank + 1) * each]) for rank in range(data_parallel)
        ]
        assert max(of_rank) == -(-len(selected) // data_parallel)

    def test_balances_tokens(self) -> None:
        lengths = [1000, 990, 30, 20, 500, 490, 300, 310]
        order = _trainer(2)._spread(lengths, [0, 1, 2, 3])
        first, second = (sum(lengths[row] for row in order[half : half + 4]) for half in (0, 4))
        assert abs(first - second) <= 40
        graph = [sum(lengths[row] for row in order[half : half + 2]) for half in (0, 4)]
        assert abs(graph[0] - graph[1]) <= 40

    def test_counts_a_sequence_parallel_group_once(self) -> None:
        trainer = _trainer(2)
        trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})
        assert trainer._data_parallel_size == 2


def _trainer(data_parallel: int) -> TokenWeightTrainerSync:
    trainer = TokenWeightTrainerSync.__new__(TokenWeightTrainerSync)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(data_parallel))})
    return trainer
