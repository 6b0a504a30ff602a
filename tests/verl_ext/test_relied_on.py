"""The names, signatures and sources that this project relies on are those it was written against.

Fails first where a new verl, transformers, TransferQueue or vLLM does not fit, and says which name. docs/following_verl.md
tells what to do then.
"""

from __future__ import annotations

import json

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.verl_ext import relied_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def known() -> dict[str, dict]:
    return json.loads(relied_on.GOLDEN.read_text())


@pytest.mark.parametrize("house", relied_on.HOUSES)
def test_everything_relied_on_is_there_and_as_it_was(known: dict[str, dict], house: str) -> None:
    lines = relied_on.differences(relied_on.collect(house), known[house])
    assert not lines, "read what changed, then python -m tests.verl_ext.relied_on --write:\n" + "\n".join(lines)


def test_overridden_methods_and_attributes_read_through_self_are_found(known: dict[str, dict]) -> None:
    trainer = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
    names = known["grail_advantage"]
    assert {f"{trainer}._compute_advantage", f"{trainer}._compute_old_log_prob", f"{trainer}.global_steps"} <= set(
        names
    )
    assert "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_inputs" in names


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


def test_an_attribute_that_no_class_has_or_sets_is_an_error_with_its_name() -> None:
    with pytest.raises(LookupError, match=r"Mine reads self\.no_such_thing, which none of PPOTrainer"):
        relied_on._attribute("no_such_thing", [PPOTrainer], "Mine reads self.no_such_thing")
