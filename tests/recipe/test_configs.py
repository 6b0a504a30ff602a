"""The configuration that changes nothing of verl's but the estimator."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext.settings import algorithm_sections

CONFIGS = Path(__file__).parents[2] / "recipe" / "config"


def test_verl_grail_is_verls_own_configuration_but_for_the_estimator() -> None:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        ours = OmegaConf.to_container(compose("verl_grail"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        verls = OmegaConf.to_container(compose("ppo_trainer"))
    assert ours["algorithm"].pop("adv_estimator") == "grail"
    for name in algorithm_sections():
        del ours["algorithm"][name]
    del ours["run_life"]
    del verls["algorithm"]["adv_estimator"]
    assert ours == verls
