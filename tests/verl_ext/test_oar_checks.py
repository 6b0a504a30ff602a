"""Start-up with OAR: what is refused and what is accepted, with configurations composed as the entry point composes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage import OarConfig
from grail_advantage.options import option_fields
from grail_advantage.verl_ext.settings import signal_of
from recipe.main_grail import prepare
from tests.composed import compose

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"


def _compose(*overrides: str) -> DictConfig:
    required = [
        "run_life.enabled=False",
        f"{ACTOR}.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.n=4",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
    ]
    return compose("grail_trainer", overrides=[*required, *overrides])


BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
REFUSED = {
    "unknown option": (
        "oar_g",
        "+algorithm.oar.gate=all",
        r"oar\.gate is not an option; it is one of .*\bgrail\b.* The options of oar are .*\bvariant\b",
    ),
    "method": (
        "oar_g",
        "+algorithm.oar.method=perturbation",
        r"oar\.method='perturbation' cannot be set in a run; .*oar_g means",
    ),
    "unknown variant": ("oar_p", "algorithm.oar.variant=robust", r"oar\.variant='robust' is .* official, grail_port"),
    "unknown probe": ("oar_g", "algorithm.oar.probe=first", r"oar\.probe='first' is unknown; choose .*answer_joint"),
    "unknown reshaper": (
        "oar_p",
        "algorithm.oar.reshaper=softmax",
        r"oar\.reshaper='softmax' is .*bilevel, log_zscore",
    ),
    "quantile": ("oar_g", "algorithm.oar.quantile=1.5", r"oar\.quantile=1\.5 must be between 0 and 1"),
    "negative boost": ("oar_p", "algorithm.oar.boost=-1", r"oar\.boost=-1\.0 must be at least 0"),
    "no noise": ("oar_g", "algorithm.oar.noise_std=0", r"oar\.noise_std=0\.0 must be greater than 0"),
    "no perturbations": (
        "oar_p",
        "algorithm.oar.max_perturbations=0",
        r"oar\.max_perturbations=0 must be a whole number",
    ),
    "sequence parallel": (
        "oar_g",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        r"ulysses_sequence_parallel_size=2 does not work with algorithm\.adv_estimator=oar_g; use 1",
    ),
    "fused kernels": (
        "oar_p",
        "actor_rollout_ref.model.use_fused_kernels=True",
        r"use_fused_kernels=True does not work with algorithm\.adv_estimator=oar_p; use false",
    ),
    "shared forward": (
        "oar_g",
        "algorithm.token_weights.share_forward=true",
        r"share_forward=True does not work .*oar_g",
    ),
    "response longer than the budget": (
        "oar_p",
        f"{BUDGET}=5119",
        r"ppo_max_token_len_per_gpu=5119 does not work with .*oar_p; .*data\.max_response_length = 5120 tokens must fit",
    ),
    "another engine": (
        "oar_p",
        f"{ACTOR}.strategy=megatron",
        r"actor\.strategy=megatron does not .*; use fsdp or fsdp2",
    ),
}


@pytest.mark.parametrize(("estimator", "override", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_oar_is_refused_with_option_and_remedy(estimator: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(_compose(f"algorithm.adv_estimator={estimator}", override))


ACCEPTED = {
    "exactly the longest row": ("oar_p", f"{BUDGET}=5120"),
    "a fixed number of rows": (
        "oar_p",
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        f"{BUDGET}=100",
    ),
    "no counterfactuals": ("oar_g", f"{BUDGET}=100"),
    "GRAIL's reshaper": ("oar_g", "algorithm.oar.reshaper=log_zscore", "algorithm.oar.weight_max=3"),
    "OAR's reshaper": ("grail", "algorithm.grail.reshaper=bilevel", "algorithm.grail.quantile=0.25"),
    "what belongs to GRAIL is not looked at": ("oar_p", "algorithm.grail.leaf=nowhere"),
    "a cap": ("oar_p", "algorithm.oar.max_perturbations=64"),
}


@pytest.mark.parametrize("overrides", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_oar_is_accepted(overrides: tuple[str, ...]) -> None:
    config = _compose(f"algorithm.adv_estimator={overrides[0]}", *overrides[1:])
    prepare(config)
    assert config.trainer.v1.trainer_mode == "grail_sync"


@pytest.mark.parametrize(("estimator", "method"), [("oar_g", "gradient"), ("oar_p", "perturbation")])
@pytest.mark.parametrize("name", ["grail_trainer", "verl_grail", "cpu_trainer"])
def test_yaml_names_every_option_of_oar_with_its_default(name: str, estimator: str, method: str) -> None:
    config = compose(name, overrides=[f"algorithm.adv_estimator={estimator}"])
    assert {*config.algorithm.oar} == option_fields(OarConfig).keys() - {"method"}
    assert signal_of(config.algorithm) == OarConfig(method)
