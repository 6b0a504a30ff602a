"""The names, signatures and sources that this project relies on are those it was written against.

Fails first where a new verl, transformers, TransferQueue or vLLM does not fit, and says which name. CONTRIBUTING.md
tells what to do then.
"""

from __future__ import annotations

import json

import pytest

from tests.verl_ext import relied_on


@pytest.mark.slow
def test_everything_relied_on_is_there_and_as_it_was() -> None:
    known = json.loads(relied_on.GOLDEN.read_text())
    lines = relied_on.differences(relied_on.collect(), known)
    assert "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in known
    assert not lines, "read what changed, then python -m tests.verl_ext.relied_on --write:\n" + "\n".join(lines)
