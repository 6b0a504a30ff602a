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


KNOWN = json.loads(relied_on.GOLDEN.read_text())


def test_everything_relied_on_is_there_and_as_it_was() -> None:
    lines = relied_on.differences(relied_on.collect(), KNOWN)
    assert f"{TRAINER}._compute_advantage" in KNOWN
    assert not lines, "read what changed, then python -m tests.verl_ext.relied_on --write:\n" + "\n".join(lines)


def test_a_source_tree_is_compared_without_an_import(tmp_path: Path) -> None:
    installed = Path(verl.__file__).parents[1]
    assert relied_on.differences_in_source(installed, KNOWN) == []
    changed = tmp_path / "verl/trainer/ppo/v1/trainer_base.py"
    changed.parent.mkdir(parents=True)
    text = (installed / changed.relative_to(tmp_path)).read_text()
    text = text.replace("def _load_checkpoint(self", "def _read_checkpoint(self").replace(
        "def _update_actor(self, batch: KVBatchMeta, metrics: dict)", "def _update_actor(self, batch, metrics: dict)"
    )
    changed.write_text(text)
    of_trainer = {name: entry for name, entry in KNOWN.items() if name.startswith(TRAINER)}
    gone, other = relied_on.differences_in_source(tmp_path, of_trainer)
    assert gone == f"{TRAINER}._load_checkpoint: gone from {TRAINER}._load_checkpoint"
    assert other == f"{TRAINER}._update_actor: its source differs"
