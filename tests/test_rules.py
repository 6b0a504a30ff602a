"""Every rule of every table: the setting that it carries is refused, warned of, or switches the shortcut off; the defaults are
and do nothing of the kind. TRL's are in ``trl_ext/rules_checks.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage.rules import Rule
from grail_advantage.verl_ext import rules
from grail_advantage.verl_ext.checks import check_config
from grail_advantage.verl_ext.rules import Skipping, choose_skipping, shares_forward
from grail_advantage.verl_ext.settings import ACTOR, METHOD, ROLLOUT, SHARE, SKIP
from recipe import rules as recipe_rules
from tests.composed import compose, parsed, prepare

EVERYTHING = Skipping(skip_update=True, cut_tails=True, skip_old_log_probs=True)
REFUSALS = {
    "every run": rules.EVERY_RUN,
    "methods": rules.REFUSALS,
    "recipe": recipe_rules.REFUSALS,
    "CPU": recipe_rules.ON_CPU,
}
SHORTCUTS = {
    "sharing": rules.AGAINST_SHARING,
    "skipping": rules.AGAINST_SKIPPING,
    "tails": rules.AGAINST_TAILS,
    "forward": rules.AGAINST_FORWARD,
}


def _cases(tables: dict[str, tuple[Rule, ...]]) -> pytest.MarkDecorator:
    pairs = [pytest.param(name, rule, id=rule.id) for name, table in tables.items() for rule in table]
    return pytest.mark.parametrize(("table", "rule"), pairs)


def _compose(table: str, *overrides: str) -> DictConfig:
    required = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    name = "cpu_trainer" if table == "CPU" else "grail_trainer"
    return compose(name, [*required, *overrides])


@_cases(REFUSALS)
def test_refused_before_the_trainer_is_chosen(table: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so before Ray starts; with the option, its value, the reason and the remedy."""
    if table == "CPU":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = _compose(table, *rule.example)
    run, mode = parsed(config), config.trainer.v1.trainer_mode
    option, remedy = (part if isinstance(part, str) else part(run) for part in (rule.option, rule.remedy))
    beside = {"methods": run.named(METHOD), "CPU": "VERL_PLATFORM=cpu"}.get(table)
    with pytest.raises(ValueError) as refused:
        prepare(config)
    with_what = f" with {beside}" if beside else ""
    assert str(refused.value) == f"{option}={run[option]} does not work{with_what}: {rule.because}; {remedy}"
    assert table in ("recipe", "CPU") or config.trainer.v1.trainer_mode == mode


def test_the_defaults_break_no_rule(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tables = REFUSALS | {"warnings": rules.WARNINGS} | SHORTCUTS
    for table, each in tables.items():
        run = parsed(_compose(table, f"{SKIP}=auto"))
        assert [rule.id for rule in each if rule.when(run)] == [], table
    prepare(_compose("methods"))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    prepare(_compose("CPU"))
    assert " does not work with " not in caplog.text
    ids = [rule.id for each in tables.values() for rule in each]
    assert len(ids) == len({*ids})


@_cases({"warnings": rules.WARNINGS})
def test_warned_of(table: str, rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    run = check_config(_compose(table, *rule.example))
    option, remedy = (part if isinstance(part, str) else part(run) for part in (rule.option, rule.remedy))
    assert f"{option}={run[option]}: {rule.because}; {remedy}" in caplog.text


@_cases(SHORTCUTS)
def test_a_shortcut_that_is_not_exact_is_left_out(table: str, rule: Rule) -> None:
    """With ``auto``, which names the setting; ``true`` is refused where a shortcut as a whole goes."""
    run = parsed(_compose(table, f"{SKIP}=auto", *rule.example))
    setting, because = rule.obstacle(run)
    without = {
        "skipping": Skipping(),
        "tails": replace(EVERYTHING, cut_tails=False),
        "forward": replace(EVERYTHING, skip_old_log_probs=False),
    }
    if table in without:
        left_out, lines = choose_skipping(run)
        assert left_out == without[table] and any(line.endswith(f" with {setting}: {because}") for line in lines)
    else:
        assert not shares_forward(run)
    shortcut = SHARE if table == "sharing" else SKIP
    forced = _compose(table, f"{shortcut}=true", *rule.example)
    if table in ("sharing", "skipping"):
        with pytest.raises(ValueError) as refused:
            check_config(forced)
        assert str(refused.value) == f"{shortcut}=True does not work with {setting}: {because}; use auto"
    else:
        check_config(forced)


def test_shortcuts_are_taken_where_nothing_is_against_them() -> None:
    for choice in ("auto", "true"):
        run = parsed(_compose("methods", f"{SKIP}={choice}", f"{SHARE}={choice}"))
        assert choose_skipping(run) == (EVERYTHING, []) and shares_forward(run)
    run = parsed(_compose("methods", f"{SKIP}=false", f"{SHARE}=false"))
    assert choose_skipping(run) == (Skipping(), []) and not shares_forward(run)
