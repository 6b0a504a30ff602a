"""The registered estimators in a trainer of verl's that has no token weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from grail_advantage.method import methods


@pytest.mark.parametrize("name", methods())
def test_a_trainer_without_token_weights_says_what_to_start(name: str) -> None:
    data = DataProto.from_dict(
        tensors={"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    message = rf"adv_estimator={name} needs token weights, .*verl\.trainer\.main_ppo .*docs/own_trainer\.md"
    for config in (None, {"token_weights": torch.ones(2, 3)}):
        with pytest.raises(ValueError, match=message):
            compute_advantage(data, name, config=config)
