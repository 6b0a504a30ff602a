"""Engines of verl's other than FSDP: methods without a pass start, the others and ``skip_zero_advantage`` name the engine.

With verl's own configurations, as its stock command composes them; the engines themselves are not installed here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker

from grail_advantage.method import build
from grail_advantage.verl_ext import trainer
from grail_advantage.verl_ext.checks import check_config
from grail_advantage.verl_ext.entry import prepare_run
from grail_advantage.verl_ext.settings import Settings
from tests.composed import VERL, compose
from tests.core.common import METHODS
from tests.verl_ext.one_step import Workers
from tests.verl_ext.test_one_step import Step

ACTOR = "actor_rollout_ref.actor"
STRATEGY, CHUNKING = f"{ACTOR}.strategy", "entropy_from_logits_with_chunking"
COMPOSED = {
    "megatron": ["model_engine=megatron", f"{ACTOR}.{CHUNKING}=True"],
    "veomni": ["model_engine=veomni", f"{ACTOR}.veomni.{CHUNKING}=True"],
    "torchtitan": ["model_engine=torchtitan", f"{ACTOR}.torchtitan.{CHUNKING}=True"],
    # verl 0.9.1 has these engines, and no configuration of an actor for them.
    "automodel": [f"{STRATEGY}=automodel", f"{ACTOR}.{CHUNKING}=True"],
    "fsdp_turbo": [f"{STRATEGY}=fsdp_turbo", f"{ACTOR}.{CHUNKING}=True"],
}
BUILT_IN = {name: build(name).uses for name in METHODS}
WITHOUT_PASS = [name for name, uses in BUILT_IN.items() if not uses]


def _compose(engine: str, method: str, *options: str) -> DictConfig:
    required = [
        f"{ACTOR}.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.model.path=nowhere",
    ]
    config = compose("ppo_trainer", [*COMPOSED[engine], *required], VERL)
    with open_dict(config):
        config.merge_with_dotlist([f"algorithm.adv_estimator={method}", *options])
    return config


@pytest.fixture(scope="module", params=COMPOSED)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_methods_without_a_pass_start(engine: str) -> None:
    assert {"uniform", "surprisal", "entropy"} <= set(WITHOUT_PASS)
    config = _compose(engine, "uniform", "actor_rollout_ref.model.use_fused_kernels=True")
    for name in WITHOUT_PASS:
        config.algorithm.adv_estimator, config.trainer.v1.trainer_mode = name, "sync"
        prepare_run(config)
        assert config.trainer.v1.trainer_mode == "grail_sync"


def test_methods_with_a_pass_name_the_engine_and_what_runs(engine: str) -> None:
    config = _compose(engine, "grail")
    for name in BUILT_IN.keys() - set(WITHOUT_PASS):
        config.algorithm.adv_estimator = name
        with pytest.raises(ValueError, match=rf"{STRATEGY}={engine} .*{name}.* fsdp"):
            check_config(config)


def test_a_step_asks_nothing_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers that give old log-probabilities and nothing else, and in which no response is left out."""
    found = []
    for strategy in ("fsdp2", "megatron"):
        with monkeypatch.context() as patch:
            step = Step(patch, [f"{STRATEGY}={strategy}", "algorithm.adv_estimator=probability"])
            step.set_signal(build("probability"))
            patch.delattr(Workers, "compute_token_scores")
            found.append(step.run())
    assert all(map(torch.equal, found[0].values(), found[1].values()))
    assert any(bool(advantages_T.any()) for advantages_T in found[0].values())


def test_a_coarse_entropy_is_refused_by_the_engines_own_option() -> None:
    place = f"{ACTOR}.veomni.{CHUNKING}"
    with pytest.raises(ValueError, match=f"{CHUNKING}.* does not work .*; use true"):
        check_config(_compose("veomni", "high_entropy", f"{place}=False"))


@pytest.mark.parametrize(("strategy", "replaced"), [("megatron", False), ("fsdp2", True)])
def test_workers_of_other_engines_are_verls_own(monkeypatch: pytest.MonkeyPatch, strategy: str, replaced: bool) -> None:
    class Verls:
        def __init__(self) -> None:
            actor = {"actor_rollout_ref": {"actor": {"strategy": strategy}}}
            self.settings = Settings.parse(OmegaConf.create({"algorithm": {"adv_estimator": "uniform"}, **actor}))

        def _init_resource_pool_mgr(self) -> None:
            self.role_worker_mapping: dict[Any, Any] = {Role.ActorRollout: ActorRolloutRefWorker}

    class Ours(trainer.TokenWeightTrainer, Verls):
        def __init__(self) -> None:
            Verls.__init__(self)

    monkeypatch.setattr(trainer, "ray", SimpleNamespace(remote=lambda worker: worker))
    made = Ours()
    made._init_resource_pool_mgr()
    expected = trainer.TokenWeightActorWorker if replaced else ActorRolloutRefWorker
    assert made.role_worker_mapping == {Role.ActorRollout: expected}
