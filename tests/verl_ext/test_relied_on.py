"""The names, signatures and sources that this project relies on are those it was written against.

Fails first where a new verl, transformers, TransferQueue or vLLM does not fit, and says which name. docs/dev/following_verl.md
tells what to do then.
"""

from __future__ import annotations

import json

import pytest

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


def test_another_signature_and_another_source_are_told_apart() -> None:
    def before(batch: object, metrics: dict) -> None:
        metrics["rows"] = batch

    def after(batch: object, metrics: dict) -> None:
        metrics["rows"] = [batch]

    def longer(batch: object, metrics: dict, step: int) -> None:
        metrics["rows"] = batch

    old, new = {"f": relied_on.describe(before)}, {"f": relied_on.describe(after)}
    assert [line.split(" was ")[0] for line in relied_on.differences(new, old)] == ["f: its source"]
    changed = relied_on.differences({"f": relied_on.describe(longer)}, old)
    assert [line.split(" was ")[0] for line in changed] == ["f: its signature", "f: its source"]
