"""Every rule of TRL's tables, and what token weights need of TRL's source; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grail_advantage import Grail
from grail_advantage.rules import Rule
from grail_advantage.trl_ext.rules import (
    AGAINST_SKIPPING,
    OVERRIDDEN,
    REFUSALS,
    TESTED,
    WARNINGS,
    Arguments,
    check_arguments,
)
from grail_advantage.view.analysis.specs import parse_method
from recipe.marked_text import marked
from scripts import docs_pages
from tests.core.tiny_models import tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

OPTIONS = {*inspect.signature(GRPOConfig).parameters, *inspect.signature(GRPOTrainer).parameters}
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
    """By its option's name."""
    arguments = _arguments(tmp_path, rule.example)
    option = rule.option if isinstance(rule.option, str) else rule.option(arguments)
    assert next(each for each in REFUSALS if each.when(arguments)) is rule and option in OPTIONS
    if arguments.processes == 1:
        with pytest.raises(ValueError, match=f"^{option}="):
            check_arguments(arguments.given, arguments.signal, TESTED)


@pytest.mark.parametrize("rule", WARNINGS, ids=lambda rule: rule.id)
def test_warned_of(tmp_path: Path, rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    arguments, options = _arguments(tmp_path, rule.example), dict(rule.example)
    build(tmp_path, weights={"token_weights": parse_method(options.pop("token_weights"))}, **options)
    assert rule.warning(arguments) in caplog.messages


@pytest.mark.parametrize("rule", AGAINST_SKIPPING, ids=lambda rule: rule.id)
def test_leaving_out_is_refused_where_a_response_without_an_advantage_matters(tmp_path: Path, rule: Rule) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")  # where TRL looks for a reference model
    model.config._name_or_path = str(tmp_path / "model")
    build(tmp_path, model=model, **rule.example)
    with pytest.raises(ValueError, match=f"^skip_zero_advantage=True .* {rule.option}="):
        build(tmp_path, model=model, weights={"skip_zero_advantage": True}, **rule.example)


def test_a_plain_run_breaks_no_rule(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, {})
    assert not [rule.id for rule in (*REFUSALS, *WARNINGS, *AGAINST_SKIPPING) if rule.when(arguments)]
    build(tmp_path, weights={"skip_zero_advantage": True})
    with pytest.raises(ValueError, match=r"^loss_type='luspo'"):
        build(tmp_path, loss_type="luspo")


def test_the_table_of_the_page_is_current() -> None:
    assert marked((docs_pages.ROOT / "docs/works_with.md").read_text(encoding="utf-8"), "trl") == docs_pages.trl()


RELIED_ON = {
    "_prepare_inputs": ["self._generate_and_score_completions("],
    "_generate_and_score_completions": [
        *('"prompt_ids": ', '"prompt_mask": ', '"completion_ids": ', '"completion_mask": ', '"advantages": '),
        *('output["old_per_token_logps"]', "self._calculate_rewards("),
    ],
    "_generate": ["return prompt_ids, completion_ids, tool_mask, completions"],
    "_tool_call_loop": ["= self._generate_single_turn(", "for idx in range(len(idxs_with_tool)):"],
    "_log_completion_extra": ["self._pending_extra_logs[column].extend(values)"],
    # Advantages of one number a token, and what a loss is divided by.
    "_compute_loss": [
        'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',
        *("if advantages.dim() == 1:", "advantages.unsqueeze(1)", 'inputs["num_items_in_batch"]'),
        *(".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()", ".sum() / mask.sum().clamp(min=1.0)"),
        *("(per_token_loss.size(0) * self.max_completion_length)", "self._get_per_token_logps_and_entropies("),
    ],
}
"""Texts of ``GRPOTrainer``'s methods on which token weights rely."""


@pytest.mark.parametrize("name", RELIED_ON)
def test_what_is_relied_on_is_there(name: str) -> None:
    source = inspect.getsource(getattr(GRPOTrainer, name))
    assert not [text for text in RELIED_ON[name] if text not in source]


def test_a_trl_without_an_overridden_method_is_refused_and_a_newer_one_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = _arguments(tmp_path, {}).given
    check_arguments(given, Grail(), trl.__version__)
    assert not caplog.messages
    check_arguments(given, Grail(), "99.0")
    assert "99.0" in caplog.text
    monkeypatch.delattr(GRPOTrainer, OVERRIDDEN[0])
    with pytest.raises(ValueError, match=OVERRIDDEN[0]):
        check_arguments(given, Grail(), "99.0")


def test_advantages_that_trl_makes_after_the_weights_are_refused(tmp_path: Path) -> None:
    class Later(scripted.ScriptedTokenWeights):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            return GRPOTrainer._generate_and_score_completions(self, inputs)

    with pytest.raises(RuntimeError, match="advantages"):
        build(tmp_path, Later, max_steps=1).train()
