"""Every rule of TRL's tables: the arguments that it carries are refused, and those of a plain run are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grail_advantage.rules import Rule
from grail_advantage.trl_ext.checks import check_arguments
from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, REFUSALS, WARNINGS, Arguments
from grail_advantage.view.analysis.specs import parse_method
from recipe.marked_text import marked
from scripts import rules_page
from tests.core.tiny_models import tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

OF_TRAINER = ("tools", "rollout_func", "environment_factory", "processing_class", "train_dataset")


def _arguments(folder: Path, example: dict[str, Any]) -> Arguments:
    """On the settings alone: this machine cannot start all of them."""
    changes = {"token_weights": "grail", "processes": 1, "train_dataset": scripted.prompts(), **example}
    signal, processes = parse_method(changes.pop("token_weights")), changes.pop("processes")
    given = {name: changes.pop(name) for name in OF_TRAINER if name in changes}
    if isinstance(given["train_dataset"], dict):
        given["train_dataset"] = Dataset.from_dict(given["train_dataset"])
    config = scripted.config(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return Arguments(signal, {"args": config, **given}, processes)


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.id)
def test_refused(tmp_path: Path, rule: Rule) -> None:
    arguments = _arguments(tmp_path, rule.example)
    option, remedy = (part if isinstance(part, str) else part(arguments) for part in (rule.option, rule.remedy))
    beside = f"token_weights={arguments.signal.name!r}"
    broken = [each for each in REFUSALS if each.when(arguments)]
    assert broken[0] is rule
    if arguments.processes == 1:
        with pytest.raises(ValueError) as refused:
            check_arguments(arguments.given, arguments.signal)
        assert str(refused.value) == f"{arguments.named(option)} does not work with {beside}: {rule.because}; {remedy}"


@pytest.mark.parametrize("rule", WARNINGS, ids=lambda rule: rule.id)
def test_warned_of(tmp_path: Path, rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    arguments, options = _arguments(tmp_path, rule.example), dict(rule.example)
    build(tmp_path, weights={"token_weights": parse_method(options.pop("token_weights"))}, **options)
    assert rule.warning(arguments) in caplog.messages


def test_a_plain_run_breaks_no_rule(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, {})
    assert not [rule.id for rule in (*REFUSALS, *WARNINGS, *AGAINST_SKIPPING) if rule.when(arguments)]
    assert len({rule.id for rule in (*REFUSALS, *AGAINST_SKIPPING)}) == len(REFUSALS) + len(AGAINST_SKIPPING)
    build(tmp_path, weights={"skip_zero_advantage": True})
    with pytest.raises(ValueError, match="loss_type='luspo' does not work"):
        build(tmp_path, loss_type="luspo")


@pytest.mark.parametrize("rule", AGAINST_SKIPPING, ids=lambda rule: rule.id)
def test_leaving_out_is_refused_where_a_response_without_an_advantage_matters(tmp_path: Path, rule: Rule) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")  # where TRL looks for a reference model
    model.config._name_or_path = str(tmp_path / "model")
    build(tmp_path, model=model, **rule.example)
    with pytest.raises(ValueError) as refused:
        build(tmp_path, model=model, weights={"skip_zero_advantage": True}, **rule.example)
    setting, because = rule.obstacle(_arguments(tmp_path, rule.example))
    assert str(refused.value) == f"skip_zero_advantage=True does not work with {setting}: {because}; {rule.remedy}"


def test_the_table_of_the_page_is_current() -> None:
    assert marked(rules_page.PAGE.read_text(encoding="utf-8"), "trl") == rules_page.trl_table()
