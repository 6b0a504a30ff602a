"""The registered estimator through verl's own ``compute_advantage``, and what stops runs that it cannot serve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from grail_advantage.methods import methods

GROUPS = ["a", "a", "b", "a", "b", "c", "a", "d", "d"]
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 2.0, -1.0]
"""Group a: one of four is right. Group b: equal rewards. Group c: a single row. Group d: two rows, the second is padding."""
LENGTHS = [3, 5, 2, 4, 5, 1, 2, 4, 0]

# 1/4 right: mean 1/4, deviations 3/4 and -1/4, sample standard deviation sqrt(1/4) = 1/2.
DR_GRPO = [0.75, -0.25, 0.0, -0.25, 0.0, 1.0, -0.25, 1.5, 0.0]
GRPO = [1.5, -0.5, 0.0, -0.5, 0.0, 1.0, -0.5, 1.5 / math.sqrt(4.5), 0.0]


def _batch() -> tuple[DataProto, torch.Tensor]:
    """A batch of verl's as its trainer hands it over, and weights that name their row and token."""
    width = max(LENGTHS)
    mask_BT = (torch.arange(width) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    rewards_BT = torch.zeros(len(LENGTHS), width)
    for row, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        rewards_BT[row, max(0, length - 1)] = reward
    weights_BT = 0.5 + torch.arange(len(LENGTHS)).unsqueeze(1) + 0.125 * torch.arange(width)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards_BT, "response_mask": mask_BT},
        non_tensors={"uid": np.array(GROUPS, dtype=object)},
    )
    return data, weights_BT


def _advantages(name: str, config: dict[str, Any], normalised: bool) -> DataProto:
    data, _ = _batch()
    return compute_advantage(data, name, norm_adv_by_std_in_grpo=normalised, config=config)


@pytest.mark.parametrize(("normalised", "expected"), [(True, GRPO), (False, DR_GRPO)], ids=["grpo", "dr_grpo"])
class TestThroughVerl:
    def test_is_weight_times_advantage(self, normalised: bool, expected: list[float]) -> None:
        _, weights_BT = _batch()
        config = {"token_weights": weights_BT, "norm_adv_by_std_in_grpo": normalised}
        batch = _advantages("grail", config, normalised).batch
        for row, length in enumerate(LENGTHS):
            for t in range(weights_BT.shape[1]):
                value = expected[row] * (0.5 + row + 0.125 * t) if t < length else 0.0
                # verl adds 1e-6 to the standard deviation.
                assert float(batch["advantages"][row, t]) == pytest.approx(value, rel=1e-5), (row, t)
        assert torch.equal(batch["advantages"], batch["returns"])

    def test_is_exactly_weight_times_verls_own(self, normalised: bool, expected: list[float]) -> None:
        _, weights_BT = _batch()
        own = _advantages("grpo", {}, normalised).batch["advantages"]
        for name, method in methods().items():
            config = {"token_weights": weights_BT, "norm_adv_by_std_in_grpo": normalised}
            if method.signal_class.__module__.startswith("grail_advantage."):
                assert torch.equal(_advantages(name, config, normalised).batch["advantages"], own * weights_BT)


def test_weights_that_are_not_finite_outside_the_mask_do_no_harm() -> None:
    """What padding holds is nobody's business; a product with the mask would make it NaN."""
    data, weights_BT = _batch()
    mask_BT = data.batch["response_mask"].bool()
    config = {"token_weights": torch.where(mask_BT, weights_BT, math.nan), "norm_adv_by_std_in_grpo": False}
    advantages_BT = _advantages("grail", config, False).batch["advantages"]
    assert advantages_BT.isfinite().all()
    assert (advantages_BT[~mask_BT] == 0).all()


@pytest.mark.parametrize("config", [None, {}, {"token_weights": None}, {"norm_adv_by_std_in_grpo": False}], ids=str)
def test_without_weights_says_what_to_start(config: dict | None) -> None:
    message = r"adv_estimator=oar_g needs token weights, .*docs/own_trainer\.md(.|\n)*verl\.trainer\.main_ppo"
    message_swapped = r"verl\.trainer\.main_ppo(.|\n)*docs/own_trainer\.md"
    with pytest.raises(ValueError, match=f"{message}|{message_swapped}"):
        compute_advantage(_batch()[0], "oar_g", config=config)
