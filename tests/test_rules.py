"""Every rule of verl's tables and of the recipe's: an example that breaks it (``test_rules.json``, in the tables' order) is
refused, or warned of, by the name of its option, or keeps every response in the update; the defaults break none. TRL's are in
``trl_ext/core_checks.py``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule
from grail_advantage.verl_ext import settings as rules
from grail_advantage.verl_ext.entry import check_config
from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT, SKIP, why_not_skip
from recipe import rules as recipe_rules
from tests.composed import compose, parsed, prepare

REFUSED, WARNED, EVERY_RESPONSE = json.loads(Path(__file__).with_suffix(".json").read_text()).values()
OF_REFUSED, OF_WARNED = ([rule for rule in rules.RULES if rule.warned == warned] for warned in (False, True))


def composed(overrides: str, name: str = "grail_trainer") -> DictConfig:
    required = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    return compose(name, [*required, *overrides.split()])


CASES = [(rule, overrides, "grail_trainer") for rule, overrides in zip(OF_REFUSED, REFUSED, strict=True)]
for name, table in (("grail_trainer", recipe_rules.REFUSALS), ("cpu_trainer", recipe_rules.ON_CPU)):
    CASES += [(rule, " ".join(rule.example), name) for rule in table]


@pytest.mark.parametrize(("rule", "overrides", "name"), CASES)
def test_refused_before_the_trainer_is_chosen(
    rule: Rule, overrides: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cpu_trainer":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = composed(overrides, name)
    mode, option = config.trainer.v1.trainer_mode, rule.option
    option = option if isinstance(option, str) else option(parsed(config))
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert option in str(refused.value) and config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize(("rule", "overrides"), list(zip(OF_WARNED, WARNED, strict=True)))
def test_warned_of(rule: Rule, overrides: str, caplog: pytest.LogCaptureFixture) -> None:
    check_config(composed(overrides))
    assert rule.option in caplog.text


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
    assert not [rule for rule in (*OF_REFUSED, *OF_WARNED) if f"{rule.option}=" in caplog.text]


def test_what_the_loaded_model_has_against_it() -> None:
    settings = parsed(composed(""))
    router = SimpleNamespace(get_text_config=lambda: SimpleNamespace(output_router_logits=True))
    other, same = (Finding(difference, 2e-4, "alone") for difference in (0.7, 1e-6))
    assert why_not_skip(settings, router) and why_not_skip(settings, probe=lambda: other)
    assert why_not_skip(settings, probe=lambda: same) == ""
