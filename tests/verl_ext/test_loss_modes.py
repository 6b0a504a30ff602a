"""Policy losses that read advantages of several tokens at once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import compute_policy_loss_geo_mean
from verl.workers.config import ActorConfig

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext.checks import check_config

CONFIGS = Path(__file__).parents[2] / "recipe" / "config"


def _config(method: str, loss: str) -> DictConfig:
    overrides = [f"algorithm.adv_estimator={method}", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("grail_trainer", overrides=overrides)


def test_a_loss_that_averages_advantages_over_a_response_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"policy_loss\.loss_mode=geo_mean .*adv_estimator=grail; it averages .*uniform"
    ):
        check_config(_config("grail", "geo_mean"))
    check_config(_config("uniform", "geo_mean"))
    check_config(_config("grail", "gspo"))

    # Why: two distributions of the same sum over the tokens are the same to it.
    log_probs, mask = torch.log(torch.rand(1, 4)), torch.ones(1, 4)
    config = ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True)
    losses = [
        compute_policy_loss_geo_mean(log_probs, log_probs, torch.tensor([advantages]), mask, config=config)[0]
        for advantages in ([-1.0, -1.0, -1.0, -1.0], [-4.0, 0.0, 0.0, 0.0])
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_whose_choice_of_tokens_moves_with_the_weights_is_named(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_config(_config("grail", loss))
    assert f"loss_mode={loss} picks tokens" in caplog.text
    caplog.clear()
    check_config(_config("uniform", loss))
    check_config(_config("grail", "vanilla"))
    assert "picks tokens" not in caplog.text
