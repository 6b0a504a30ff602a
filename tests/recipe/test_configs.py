"""The configuration that changes nothing of verl's but the estimator, and the folder in the form of verl's recipes."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext.settings import Settings, algorithm_sections

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipe" / "config"


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


def test_the_folder_in_verls_form_has_the_published_settings() -> None:
    """The recipe's, but for the names of the run and what only one of the two needs."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        ours = compose("grail_trainer")
    with initialize_config_dir(str(ROOT / "examples/verl_recipe/grail/config"), version_base=None):
        theirs = compose("grail_trainer")
    settings = [Settings.parse(config) for config in (ours, theirs)]
    assert settings[0].signal == settings[1].signal and settings[0].answer == settings[1].answer
    ours, theirs = (OmegaConf.to_container(config) for config in (ours, theirs))
    assert ours["algorithm"]["token_weights"]["skip_zero_advantage"] == "auto"
    assert theirs["algorithm"]["token_weights"]["skip_zero_advantage"] == "auto"
    for name in algorithm_sections():
        del ours["algorithm"][name]
        theirs["algorithm"].pop(name, None)
    del ours["run_life"], ours["trainer"]["experiment_name"], theirs["trainer"]["experiment_name"]
    assert ours == theirs
