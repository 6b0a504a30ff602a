"""The names, signatures and sources that this project relies on are those it was written against.

Fails first where a new verl, transformers, TransferQueue or vLLM does not fit, and says which name. docs/dev/following_verl.md
tells what to do then.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verl

from tests.verl_ext import relied_on

pytestmark = pytest.mark.slow

TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"


@pytest.fixture(scope="module")
def known() -> dict[str, dict]:
    return json.loads(relied_on.GOLDEN.read_text())


@pytest.mark.parametrize("house", relied_on.HOUSES)
def test_everything_relied_on_is_there_and_as_it_was(known: dict[str, dict], house: str) -> None:
    lines = relied_on.differences(relied_on.collect(house), known[house])
    assert f"{TRAINER}._compute_advantage" in known["grail_advantage"]
    assert not lines, "read what changed, then python -m tests.verl_ext.relied_on --write:\n" + "\n".join(lines)


def test_a_source_tree_is_compared_without_an_import(known: dict[str, dict], tmp_path: Path) -> None:
    installed = Path(verl.__file__).parents[1]
    for house in relied_on.HOUSES:
        assert relied_on.differences_in_source(installed, known[house]) == []
    changed = tmp_path / "verl/trainer/ppo/v1/trainer_base.py"
    changed.parent.mkdir(parents=True)
    text = (installed / changed.relative_to(tmp_path)).read_text()
    text = text.replace("def _save_checkpoint(self", "def _write_checkpoint(self").replace(
        "def fit(self, agent_loop_manager: AgentLoopManager):", "def fit(self, agent_loop_manager):"
    )
    changed.write_text(text)
    of_trainer = {name: entry for name, entry in known["grail_advantage"].items() if name.startswith(TRAINER)}
    lines = relied_on.differences_in_source(tmp_path, of_trainer)
    assert lines == [
        f"{TRAINER}._save_checkpoint: gone from {TRAINER}._save_checkpoint",
        f"{TRAINER}.fit: its source differs",
    ]


def test_another_signature_and_another_source_are_told_apart() -> None:
    def before(batch: object, metrics: dict) -> None:
        metrics["rows"] = batch

    def after(batch: object, metrics: dict) -> None:
        metrics["rows"] = [batch]

    def longer(batch: object, metrics: dict, step: int) -> None:
        metrics["rows"] = batch

    old, new = {"f": relied_on.describe(before)}, {"f": relied_on.describe(after)}
    assert [line.split(" was ")[0] for line in relied_on.differences(new, old)] == ["f: its source", "f: its at"]
    changed = relied_on.differences({"f": relied_on.describe(longer)}, old)
    assert [line.split(" was ")[0] for line in changed] == ["f: its signature", "f: its source", "f: its at"]
