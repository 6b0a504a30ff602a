"""What a run's configuration says about token weights: the method, and when its saliency shares a forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from grail_advantage import Grail, Method, Oar
from grail_advantage.method import build, methods
from grail_advantage.methods.saliency import Saliency
from grail_advantage.verl_ext.rules import shares_forward
from grail_advantage.verl_ext.settings import Settings, algorithm_sections
from tests.core.common import METHODS

OURS = {name: methods()[name] for name in METHODS}


def _config(share: Any = ..., **algorithm: Any) -> DictConfig:
    known: dict[str, Any] = {
        "adv_estimator": "grail",
        "rollout_correction": {"bypass_mode": False},
        "use_kl_in_reward": False,
    }
    if share is not ...:
        known["token_weights"] = {"share_forward": share}
    return OmegaConf.create({"algorithm": {**known, **algorithm}})


def _shares(config: DictConfig, signal: Method | None = None) -> bool:
    settings = Settings.parse(config)
    settings = replace(settings, signal=signal or settings.signal)
    return shares_forward(settings)


def test_shares_the_forward_by_default() -> None:
    """Values that are unknown are in ``test_checks.py``."""
    assert all(map(_shares, (_config(), _config(rollout_correction=None), _config(token_weights=None))))
    for choice in (1, 0):
        with pytest.raises(ValueError, match="share_forward="):
            _shares(_config(choice))


def test_a_saliency_that_runs_in_a_way_of_its_own_shares_no_forward() -> None:
    class Own(Saliency):
        def run(self, rows, model):
            return super().run(rows, model)

    class Plain(Saliency):
        pass

    assert _shares(_config(), Plain())
    assert not _shares(_config(), Own())


def test_options_come_from_the_methods_section() -> None:
    config = _config(grail={"preset": "robust", "gate": None}, oar={"variant": "grail_port"})
    assert Settings.parse(config).signal == Grail("robust")
    config.algorithm.adv_estimator = "oar_p"
    assert Settings.parse(config).signal == Oar("perturbation", variant="grail_port")
    sections = algorithm_sections()
    assert {method.section for method in OURS.values()} < set(sections) and "method" not in sections["oar"]
    for name, method in OURS.items():
        for given in ({}, {method.section: None}, sections):
            assert Settings.parse(_config(**{**given, "adv_estimator": name})).signal == build(name)
    with pytest.raises(ValueError, match=r"'grial' is no method; choose one of .*\bgrail\b"):
        Settings.parse(_config(adv_estimator="grial"))
