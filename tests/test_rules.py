"""Every rule of verl's tables and of the recipe's: settings that break it are refused, warned of, or keep every response in the
update; the defaults are and do nothing of the kind. TRL's are in ``trl_ext/rules_checks.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule
from grail_advantage.verl_ext import rules
from grail_advantage.verl_ext.checks import check_config
from grail_advantage.verl_ext.rules import CHUNKING, LOSS, MODEL_DTYPE, SCALE, why_not_skip
from grail_advantage.verl_ext.settings import ACTOR, BASE, BYPASS, METHOD, MODEL, ROLLOUT, SKIP, SLICES
from recipe import rules as recipe_rules
from tests.composed import compose, parsed, prepare

TWO_SLICES, ATTENTION = f"{SLICES[0]}=2", f"+{MODEL}.override_config.attn_implementation=sdpa"
REFUSED = (
    # In the order of the table, and what its message names.
    ("trainer.use_v1=False", "use_v1=False"),
    ("++algorithm.token_weights.share_forward=auto", "token_weights.share_forward"),
    ("++algorithm.token_weights.trainer_module=mine", "VERL_USE_EXTERNAL_MODULES"),
    ("trainer.v1.trainer_mode=mine", "trainer_mode=mine"),
    (f"{BASE}=gae", f"{BASE}=gae"),
    (f"{BYPASS}=True {METHOD}=entropy {ROLLOUT}.top_k=-1", f"{BYPASS}=True does not work with {METHOD}=entropy"),
    (f"{CHUNKING}=False {METHOD}=high_entropy", "use true"),
    (f"{MODEL}.use_fused_kernels=True {METHOD}=oar_g {ACTOR}.strategy=fsdp", "use_fused_kernels=True"),
    (f"{TWO_SLICES} {METHOD}=oar_g", "a slice"),
    (f"{TWO_SLICES} {MODEL}.use_remove_padding=False", "use_remove_padding=true"),
    (f"{TWO_SLICES} {ATTENTION}", "attn_implementation=sdpa"),
    (f"{LOSS}=geo_mean", "loss_mode=geo_mean"),
    (f"{ACTOR}.strategy=megatron", "strategy=megatron"),
    (f"{MODEL_DTYPE}=fp16", MODEL_DTYPE),
    (f"{ROLLOUT}.multi_turn.max_parallel_calls=2 {METHOD}=turn_rloo", "TurnToolAgent"),
)
WARNED = (
    (f"{METHOD}=oar_g", "noise"),
    (f"{ACTOR}.loss_agg_mode=token-mean {METHOD}=turn_rloo", "loss_agg_mode=token-mean"),
)
EVERY_RESPONSE = (
    f"{ACTOR}.strategy=megatron {METHOD}=uniform",
    *(f"{LOSS}={loss}" for loss in ("clip_cov", "kl_cov", "dro", "bypass_mode", "mine")),
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.entropy_coeff=0.001",
    f"{ACTOR}.calculate_entropy=True",
    "distillation.enabled=True",
    f"{MODEL}.mtp.enable_train=True",
    f"+{MODEL}.override_config.output_router_logits=True",
    f"{SCALE}=null",
    f"++{ACTOR}.qat.mode=w4a4 ++{ACTOR}.qat.enable=True",
    f"++{ACTOR}.fsdp_config.qat.mode=w4a4 ++{ACTOR}.fsdp_config.qat.enable=True",
)


def _compose(overrides: str, name: str = "grail_trainer") -> DictConfig:
    required = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    return compose(name, [*required, *overrides.split()])


def test_the_tables_are_whole() -> None:
    assert len(REFUSED) == len(rules.EVERY_RUN) + len(rules.REFUSED) and len(WARNED) == len(rules.WARNED)


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_refused_before_the_trainer_is_chosen(place: int) -> None:
    overrides, named = REFUSED[place]
    config = _compose(overrides)
    mode = config.trainer.v1.trainer_mode
    rule = [*rules.EVERY_RUN, *rules.REFUSED][place]
    assert rule.broken(parsed(config))
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert all(part in str(refused.value) for part in (rule.option, rule.because, rule.remedy, named))
    assert config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("place", range(len(WARNED)))
def test_warned_of(place: int, caplog: pytest.LogCaptureFixture) -> None:
    overrides, named = WARNED[place]
    check_config(_compose(overrides))
    assert rules.WARNED[place].because in caplog.text and named in caplog.text


@pytest.mark.parametrize("overrides", EVERY_RESPONSE)
def test_every_response_stays_in_the_update(overrides: str) -> None:
    """With ``auto``; ``true`` is refused."""
    option = overrides.split()[0].split("=")[0].lstrip("+")
    why = why_not_skip(parsed(_compose(overrides)), probe=lambda: pytest.fail("the model is asked"))
    assert why.startswith(f"{option}=")
    with pytest.raises(ValueError) as refused:
        check_config(_compose(f"{SKIP}=true {overrides}"))
    assert str(refused.value) == f"{SKIP}=True does not work: {why}; use auto"


def test_the_defaults_break_no_rule(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    settings = parsed(_compose(f"{SKIP}=true"))
    assert why_not_skip(settings) == ""
    prepare(_compose(""))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    prepare(_compose("", "cpu_trainer"))
    assert "does not work" not in caplog.text and "is used" not in caplog.text


def test_what_the_loaded_model_has_against_it() -> None:
    settings = parsed(_compose(""))
    router = SimpleNamespace(get_text_config=lambda: SimpleNamespace(output_router_logits=True))
    assert "routers" in why_not_skip(settings, router)
    other, same = (Finding(difference, 2e-4, "behind other responses and alone") for difference in (0.7, 1e-6))
    assert "differ by 0.7 of their spread" in why_not_skip(settings, probe=lambda: other)
    assert why_not_skip(settings, probe=lambda: same) == ""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, id=rule.id)
        for name, table in (("grail_trainer", recipe_rules.REFUSALS), ("cpu_trainer", recipe_rules.ON_CPU))
        for rule in table
    ],
)
def test_the_recipes_own(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option, its value, the reason and the remedy; the defaults break none."""
    if name == "cpu_trainer":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert not rule.when(parsed(_compose("", name)))
    config = _compose(" ".join(rule.example), name)
    settings = parsed(config)
    option, remedy = (part if isinstance(part, str) else part(settings) for part in (rule.option, rule.remedy))
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert all(part in str(refused.value) for part in (f"{option}={settings[option]}", rule.because, remedy))
