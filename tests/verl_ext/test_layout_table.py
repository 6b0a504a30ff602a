"""The layout table: its refusals are raised, and the documentation shows it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import verl  # noqa: F401  its plugin registers the estimators

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext import checks
from recipe import checks as recipe_checks
from recipe.marked_text import marked
from tests.composed import compose

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layout_table", ROOT / "scripts" / "layout_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


layouts = _load()
REFUSED = [cell for cell in layouts.CELLS if isinstance(cell, layouts.Refused)]


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: f"{cell.option}: {cell.value}")
def test_refused_cell_raises_its_message(cell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if cell.cpu:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    else:
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
    name = "cpu_trainer" if cell.cpu else "grail_trainer"
    group = [] if any(".rollout.n=" in override for override in cell.overrides) else ["actor_rollout_ref.rollout.n=4"]
    config = compose(name, [*group, *cell.overrides])
    with pytest.raises(ValueError, match="^" + re.escape(cell.message)):
        if cell.recipe:
            recipe_checks.check_config(config, checks.trainer_kind(config))
        checks.check_config(config)


def test_the_page_shows_the_table() -> None:
    shown = marked((ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8"), layouts.MARKER)
    assert shown == layouts.table().strip(), "run `python scripts/layout_table.py --write docs/compatibility.md`"
