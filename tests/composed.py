"""Configurations of the recipe as a command line gives them. Hydra takes a third of a second for one composition: it is made
once a name, and the values of a command line are applied by hydra's own code to a copy."""

import pickle
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

import hydra
import verl  # noqa: F401  its plug-in wraps validate_config
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, base, flag_override
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.entry import prepare_run, trainer_kind
from grail_advantage.verl_ext.settings import Settings

FOLDER = Path(__file__).parents[1] / "recipe" / "config"
VERL = Path(str(files("verl.trainer"))) / "config"
# OmegaConf parses an interpolation each time that it is read, which took most of the time of a run's settings.
base.parse = cache(base.parse)


@cache
def _composed(folder: Path, name: str, *overrides: str) -> bytes:
    """Pickled, which is read in a fifth of the time that a copy takes."""
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return pickle.dumps(hydra.compose(name, overrides=list(overrides)))


def compose(name: str, overrides: Sequence[str] = (), folder: Path = FOLDER) -> DictConfig:
    """The configuration ``<name>.yaml`` of the recipe, or of another folder, with these overrides; the caller's own."""
    # An option has a section in front of it; what has none is another choice of files, or a section as a whole.
    values = [override for override in overrides if "." in override.split("=")[0]]
    plain_overrides = [override for override in overrides if override not in values]
    if not all(
        override.startswith(("like=", "estimator=")) for override in plain_overrides
    ):
        values = []
        plain_overrides = overrides
    config = pickle.loads(_composed(folder, name, *plain_overrides))
    with flag_override(config, "struct", True):
        ConfigLoaderImpl._apply_overrides_to_config(
            OverridesParser.create().parse_overrides(values), config
        )
    return config


def verls_on_cpu(*overrides: str) -> DictConfig:
    """verl's own settings with the methods' sections, on the CPU."""
    return compose("verl_cpu", overrides, Path(__file__).with_name("config"))


def parsed(config: DictConfig) -> Settings:
    """A run's configuration as the start-up parses it."""
    return Settings.parse(config, trainer_kind(config))


def prepare(config: DictConfig) -> Settings | None:
    """All start-up checks of a run, verl's own among them; the recipe's where the configuration is the recipe's."""
    auto_set_device(config)
    with patch.object(patches, "STARTS", ["recipe.run_life"] if "run" in config else []):
        settings = prepare_run(config)
    validate_config.__wrapped__(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    return settings
