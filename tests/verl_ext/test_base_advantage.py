"""Token weights on other advantages than GRPO's: verl's own functions, its stock trainer, and formulas worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from grail_advantage.method import build
from grail_advantage.verl_ext.settings import BASES
from tests.verl_ext.one_step import make_trainer
from tests.verl_ext.test_one_step import ROWS, Step

BASE = "algorithm.token_weights.base"
LENGTHS = [len(text.removesuffix("<end>")) + 1 for _, _, text, _ in ROWS]
GROUPS = [range(3), range(3, 6)]


def _of_groups(rewards: list[float], of_group: Callable[[list[float], list[int]], list[float]]) -> list[float]:
    return [
        advantage
        for group in GROUPS
        for advantage in of_group([rewards[row] for row in group], [LENGTHS[row] for row in group])
    ]


def _rloo(rewards: list[float], lengths: list[int]) -> list[float]:
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


def _opo(rewards: list[float], lengths: list[int]) -> list[float]:
    mean = sum(reward * length for reward, length in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [reward - mean for reward in rewards]


def _centred(rewards: list[float], lengths: list[int]) -> list[float]:
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def _normed(rewards: list[float], lengths: list[int]) -> list[float]:
    centred = _centred(rewards, lengths)
    return [value / (math.sqrt(sum(v * v for v in centred) / (len(centred) - 1)) + 1e-6) for value in centred]


def _whitened(advantages: list[float]) -> list[float]:
    """Over the tokens of the batch, with the variance's own correction."""
    count = sum(LENGTHS)
    mean = sum(a * n for a, n in zip(advantages, LENGTHS, strict=True)) / count
    variance = sum(n * (a - mean) ** 2 for a, n in zip(advantages, LENGTHS, strict=True)) / (count - 1)
    return [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages]


BY_HAND = {
    "grpo": lambda rewards: _of_groups(rewards, _normed),
    "rloo": lambda rewards: _of_groups(rewards, _rloo),
    "opo": lambda rewards: _of_groups(rewards, _opo),
    "reinforce_plus_plus_baseline": lambda rewards: _whitened(_of_groups(rewards, _centred)),
}
REWARDS = [reward for *_, reward in ROWS]


def _step(patch: pytest.MonkeyPatch, *overrides: str, name: str = "uniform") -> Step:
    step = Step(patch, ["actor_rollout_ref.rollout.n=3", *overrides])
    config = [f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=3", *overrides]
    options = {"mask_truncated": False} if name == "uniform" else {}
    step.trainer = make_trainer(config, build(name, options), step.workers)
    return step


@pytest.mark.parametrize("base", BASES)
def test_weight_one_is_the_estimator_by_hand(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _step(monkeypatch, f"{BASE}={base}").run()
    assert set(BY_HAND) == set(BASES)
    for values_T, expected in zip(found.values(), BY_HAND[base](REWARDS), strict=True):
        torch.testing.assert_close(values_T, torch.full_like(values_T, expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_weights_multiply_it(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = BY_HAND[base](REWARDS)
    step = _step(monkeypatch, f"{BASE}={base}", name="grail")
    found = step.run()
    wrong = {key for (key, _, text, _), of in zip(ROWS, expected, strict=True) if of < 0 and "boxed" in text}
    assert len(step.workers.own) == len(wrong) > 0
    for (key, _, text, _), of_row in zip(ROWS, expected, strict=True):
        weights_T = found[key] / of_row
        at = text.find("boxed{") + 6
        assert float(weights_T[-1]) == pytest.approx(1, abs=1e-3)
        assert float(weights_T[at]) == pytest.approx(5 if at > 5 else 1, rel=1e-3)


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], None]]:
    names: list[str] = []

    def register(name: str, estimator: Any) -> None:
        names.append(name)
        register_adv_est(name)(estimator)

    yield register
    for name in names:
        del ADV_ESTIMATOR_REGISTRY[name]


def test_an_estimator_of_ones_own(registered: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Any:
        advantages_BT = 2 * token_level_rewards.sum(dim=1, keepdim=True) * response_mask
        return advantages_BT, advantages_BT

    def by_token(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Any:
        return token_level_rewards, token_level_rewards

    registered("doubled", doubled)
    registered("by_token", by_token)
    with monkeypatch.context() as patch:
        found = _step(patch, f"{BASE}=doubled").run()
    assert [values_T.unique().tolist() for values_T in found.values()] == [[2 * reward] for reward in REWARDS]
    with pytest.raises(ValueError, match="base=by_token, or the trainer, gives the tokens of a response different"):
        _step(monkeypatch, f"{BASE}=by_token").run()
