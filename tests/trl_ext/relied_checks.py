"""What token weights need of TRL's trainer; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
from trl import GRPOTrainer

from grail_advantage.trl_ext import checks


def changed_trainer(folder: Path, before: str, after: str) -> type:
    """``GRPOTrainer`` of TRL's own file with a text replaced everywhere."""
    source = inspect.getsource(sys.modules[GRPOTrainer.__module__])
    assert before in source
    file = folder / "changed_grpo_trainer.py"
    file.write_text(source.replace(before, after), encoding="utf-8")
    # As a part of TRL, for its relative imports.
    spec = importlib.util.spec_from_file_location(f"trl.trainer.changed_{abs(hash((before, after)))}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.GRPOTrainer


def test_the_trainer_that_is_installed_is_accepted_as_any_version() -> None:
    for version in ("1.15.0", "1.17.0", "2.0.0"):
        checks.check_trl(GRPOTrainer, version)


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (
            "_generate_and_score_completions",
            "_make_batch",
            r"lacks .*`self._generate_and_score_completions\(` in _prepare",
        ),
        (
            "per_token_loss.size(0) * self.max_completion_length",
            "self.loss_size",
            r"lacks `\(per_token_loss.size\(0\) \* self.max_completion_length\)` in _compute_loss",
        ),
        ("if advantages.dim() == 1:", "if True:", r"lacks `if advantages.dim\(\) == 1:` in _compute_loss\(\)"),
        (
            "return prompt_ids, completion_ids, tool_mask, completions",
            "return prompt_ids, completion_ids, completions, tool_mask",
            r"lacks `return prompt_ids, completion_ids, tool_mask, completions` in _generate\(\)",
        ),
        ('"completion_mask": ', '"loss_mask": ', r'lacks `"completion_mask":` in _generate_and_score_completions'),
    ],
)
def test_a_trainer_without_a_part_is_refused_by_its_name(tmp_path: Path, before: str, after: str, missing: str) -> None:
    changed = changed_trainer(tmp_path, before, after)
    with pytest.raises(ValueError, match=r"trl 1.17.0 is installed, whose GRPOTrainer " + missing):
        checks.check_trl(changed, "1.17.0")
