"""The layout table: its tests exist, its refusals are raised, and the documentation shows it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import verl  # noqa: F401  its plugin registers the estimators

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext import checks
from recipe import checks as recipe_checks
from recipe.marked_text import marked
from tests import forked
from tests.composed import compose

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layout_table", ROOT / "scripts" / "layout_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


layouts = _load()
TESTED = [cell for cell in layouts.CELLS if not isinstance(cell, layouts.Refused)]
REFUSED = [cell for cell in layouts.CELLS if isinstance(cell, layouts.Refused)]


def _name(cell: object) -> str:
    return f"{cell.option}: {cell.value}"


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Node ids of all tests of the files that the table names."""
    files = sorted({node_id.split("::")[0] for cell in TESTED for node_id in cell.tests})
    asked = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = forked.run("pytest", *asked, *(str(ROOT / file) for file in files))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def _means(named: str, node_id: str) -> bool:
    """Whether a node id of the table means a collected one."""
    path, _, parameters = named.partition("[")
    collected_path, _, collected_parameters = node_id.partition("[")
    if collected_path != path and not collected_path.startswith(f"{path}::"):
        return False
    wanted, name = parameters.removesuffix("]"), collected_parameters.removesuffix("]")
    return not wanted or name == wanted or name.startswith((f"{wanted}:", f"{wanted}-"))


@pytest.mark.slow
@pytest.mark.parametrize("cell", TESTED, ids=_name)
def test_tests_of_a_tested_cell_exist(collected: set[str], cell: object) -> None:
    assert cell.tests
    for named in cell.tests:
        assert any(_means(named, node_id) for node_id in collected), f"{named} names no test"


@pytest.mark.parametrize("cell", REFUSED, ids=_name)
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


def test_every_cell_is_there_once_and_options_stay_together() -> None:
    names = [_name(cell) for cell in layouts.CELLS]
    assert len(set(names)) == len(names)
    options = [cell.option for cell in layouts.CELLS]
    runs = [option for index, option in enumerate(options) if index == 0 or options[index - 1] != option]
    assert len(set(runs)) == len(runs)


def test_the_page_shows_the_table() -> None:
    shown = marked((ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8"), layouts.MARKER)
    assert shown == layouts.table().strip(), "run `python scripts/layout_table.py --write docs/compatibility.md`"


def test_writes_the_table_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- layouts -->\nold\n<!-- /layouts -->\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "layout_table.py"), "--write", str(path)]
    subprocess.run(command, check=True, timeout=60)
    assert marked(path.read_text(encoding="utf-8"), layouts.MARKER) == layouts.table().strip()
