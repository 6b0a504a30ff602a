"""Every rule of verl's tables and of the recipe's: an example that breaks it is refused, or warned of, by the name of its
option, or keeps every response in the update; the defaults break none. TRL's are in ``trl_ext/core_checks.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule
from grail_advantage.verl_ext import settings as rules
from grail_advantage.verl_ext.entry import check_config
from grail_advantage.verl_ext.settings import (
    ACTOR,
    BASE,
    BYPASS,
    CHUNKING,
    LOSS,
    METHOD,
    MODEL,
    MODEL_DTYPE,
    ROLLOUT,
    SCALE,
    SKIP,
    SLICES,
    why_not_skip,
)
from recipe import rules as recipe_rules
from tests.composed import compose, parsed, prepare

TWO_SLICES = f"{SLICES[0]}=2"
REFUSED = (  # in the order of the table
    *("trainer.v1.trainer_mode=mine", f"{BASE}=gae"),
    f"{BYPASS}=True {METHOD}=entropy {ROLLOUT}.top_k=-1",
    f"{BYPASS}=True algorithm.token_dump.effect_every=1 {ROLLOUT}.top_k=-1",
    f"{CHUNKING}=False {METHOD}=high_entropy",
    f"{MODEL}.use_fused_kernels=True {METHOD}=oar_g {ACTOR}.strategy=fsdp",
    *(f"{TWO_SLICES} {METHOD}=oar_g", f"{TWO_SLICES} {MODEL}.use_remove_padding=False"),
    f"{TWO_SLICES} +{MODEL}.override_config.attn_implementation=sdpa",
    *(f"{LOSS}=geo_mean", f"{ACTOR}.strategy=megatron", f"{MODEL_DTYPE}=fp16"),
    f"{ROLLOUT}.multi_turn.max_parallel_calls=2 {METHOD}=turn_rloo",
)
WARNED = (f"{METHOD}=oar_g", f"{ACTOR}.loss_agg_mode=token-mean {METHOD}=turn_rloo")
EVERY_RESPONSE = (
    "trainer.use_v1=False",
    *(f"{LOSS}={loss}" for loss in ("clip_cov", "kl_cov", "dro", "bypass_mode", "mine")),
    *(f"{ACTOR}.strategy=megatron {METHOD}=uniform", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.001"),
    f"{MODEL}.enable_activation_offload=True",
    *(f"{ACTOR}.calculate_entropy=True", "distillation.enabled=True", f"{MODEL}.mtp.enable_train=True"),
    *(f"+{MODEL}.override_config.output_router_logits=True", f"{SCALE}=null"),
    f"++{ACTOR}.qat.mode=w4a4 ++{ACTOR}.qat.enable=True",
    f"++{ACTOR}.fsdp_config.qat.mode=w4a4 ++{ACTOR}.fsdp_config.qat.enable=True",
)


def composed(overrides: str, name: str = "grail_trainer") -> DictConfig:
    required = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    return compose(name, [*required, *overrides.split()])


def test_the_tables_are_whole() -> None:
    assert [rule.warned for rule in rules.RULES] == [False] * len(REFUSED) + [True] * len(WARNED)


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_refused_before_the_trainer_is_chosen(place: int) -> None:
    config, rule = composed(REFUSED[place]), rules.RULES[place]
    mode = config.trainer.v1.trainer_mode
    assert rule.broken(parsed(config))
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert rule.option in str(refused.value) and rule.because in str(refused.value)
    assert config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("place", range(len(WARNED)))
def test_warned_of(place: int, caplog: pytest.LogCaptureFixture) -> None:
    check_config(composed(WARNED[place]))
    assert rules.RULES[len(REFUSED) + place].option in caplog.text


@pytest.mark.parametrize("overrides", EVERY_RESPONSE)
def test_every_response_stays_in_the_update(overrides: str) -> None:
    """With ``auto``; ``true`` is refused."""
    option = overrides.split()[0].split("=")[0].lstrip("+")
    why = why_not_skip(parsed(composed(overrides)), probe=lambda: pytest.fail("the model is asked"))
    assert why.startswith(f"{option}=")
    with pytest.raises(ValueError) as refused:
        check_config(composed(f"{SKIP}=true {overrides}"))
    assert option in str(refused.value)


def test_the_defaults_break_no_rule(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert why_not_skip(parsed(composed(f"{SKIP}=true"))) == ""
    prepare(composed(""))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    prepare(composed("", "cpu_trainer"))
    options = [rule.option for rule in rules.RULES]
    assert not [option for option in options if f"{option}=" in caplog.text]


def test_what_the_loaded_model_has_against_it() -> None:
    settings = parsed(composed(""))
    router = SimpleNamespace(get_text_config=lambda: SimpleNamespace(output_router_logits=True))
    other, same = (Finding(difference, 2e-4, "alone") for difference in (0.7, 1e-6))
    assert why_not_skip(settings, router) and why_not_skip(settings, probe=lambda: other)
    assert why_not_skip(settings, probe=lambda: same) == ""


TABLES = {"grail_trainer": recipe_rules.REFUSALS, "cpu_trainer": recipe_rules.ON_CPU}


@pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(name, rule, id=rule.id) for name, table in TABLES.items() for rule in table],
)
def test_the_recipes_own(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option and its value; the defaults break none."""
    if name == "cpu_trainer":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert not rule.when(parsed(composed("", name)))
    config = composed(" ".join(rule.example), name)
    settings = parsed(config)
    option = rule.option if isinstance(rule.option, str) else rule.option(settings)
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert f"{option}={settings[option]}" in str(refused.value)
