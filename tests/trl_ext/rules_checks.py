"""Every rule of TRL's tables, and what token weights need of TRL's source; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import inspect
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from trl import GRPOConfig, GRPOTrainer

from grail_advantage.analyze import parse_method
from grail_advantage.rules import Rule, refuse
from grail_advantage.trl_ext import rules
from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, OVERRIDDEN, REFUSALS, Settings
from recipe.marked_text import marked
from recipe.published import trl_arguments
from scripts import docs_pages
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

OPTIONS = {*inspect.signature(GRPOConfig).parameters, *inspect.signature(GRPOTrainer).parameters}


def settings(folder: Path, example: dict[str, Any]) -> Settings:
    """Of a trainer with these settings in place of its own: this machine cannot start all of them."""
    trainer, method = build(folder), parse_method(example.get("token_weights", "grail"))
    args, state = copy(trainer.args), trainer.accelerator.state
    stand_in = SimpleNamespace(**{**vars(trainer), "args": args, "is_fsdp_enabled": "fsdp" in example})
    processes = 2 if method.whole_groups else 1
    stand_in.accelerator = SimpleNamespace(num_processes=processes, state=state, parallelism_config=None)
    for name, value in example.items():
        if name == "train_dataset":
            stand_in.train_dataset = SimpleNamespace(column_names=list(value))
        else:
            setattr(args if hasattr(args, name) else stand_in, name, value)
    return Settings(stand_in, method)


@pytest.mark.parametrize("rule", [*REFUSALS, *AGAINST_SKIPPING], ids=lambda rule: rule.id)
def test_a_setting_breaks_its_rule_alone(tmp_path: Path, rule: Rule) -> None:
    """And is named by TRL's own option."""
    for example, broken in ((rule.example, [rule]), ({}, [])):
        given = settings(tmp_path, example)
        assert [each for each in (*REFUSALS, *AGAINST_SKIPPING) if each.when(given)] == broken
    given = settings(tmp_path, rule.example)
    option = rule.option if isinstance(rule.option, str) else rule.option(given)
    assert option in OPTIONS
    with pytest.raises(ValueError, match=f"^{option}="):
        refuse([rule], given)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_type": ({"loss_type": "luspo"}, {}),
    "entropy_coef": ({"entropy_coef": 0.01}, {"skip_zero_advantage": True}),
    "every": ({}, {"token_dump": {"every": 2}}),
    "rows": ({}, {"token_dump": {"folder": "tokens", "rows": 4}}),
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_are_refused_as_a_trainer_is_made(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        build(tmp_path, weights=REFUSED[option][1], **REFUSED[option][0])


def test_published_settings_are_accepted(tmp_path: Path) -> None:
    config = scripted.config(tmp_path, **trl_arguments(processes=1))
    given = settings(tmp_path, {name: getattr(config, name) for name in ("loss_type", "bf16", "top_entropy_quantile")})
    refuse(REFUSALS, given)
    assert config.generation_batch_size == 256 and config.num_iterations == 4
    assert marked((docs_pages.ROOT / "docs/works_with.md").read_text(encoding="utf-8"), "trl") == docs_pages.trl()


RELIED_ON = {
    "_prepare_inputs": ["self._generate_and_score_completions("],
    "_generate_and_score_completions": [
        *('"prompt_ids": ', '"prompt_mask": ', '"completion_ids": ', '"completion_mask": ', '"advantages": '),
        *('output["old_per_token_logps"]', 'output["sampling_per_token_logps"]', "self._calculate_rewards("),
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


def test_another_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A newer one is warned of; refused is one without an overridden method, or with other advantages in its loss."""
    sources = {name: inspect.getsource(getattr(GRPOTrainer, name)) for name in RELIED_ON}
    assert not [text for name, texts in RELIED_ON.items() for text in texts if text not in sources[name]]
    rules.check_version(trl.__version__)
    assert not caplog.messages
    rules.check_version("99.0")
    assert "99.0" in caplog.text

    class Later(scripted.ScriptedTokenWeights):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            return GRPOTrainer._generate_and_score_completions(self, inputs)

    with pytest.raises(RuntimeError, match="advantages"):
        build(tmp_path, Later, max_steps=1).train()
    monkeypatch.delattr(GRPOTrainer, OVERRIDDEN[0])
    with pytest.raises(ValueError, match=OVERRIDDEN[0]):
        rules.check_version("99.0")
