"""The names, signatures and sources that this project relies on are those it was written against.

Fails first where a new verl, transformers, TransferQueue or vLLM does not fit, and says which name. CONTRIBUTING.md
tells what to do then.
"""

from __future__ import annotations

import pytest

from tests.verl_ext import relied_on


@pytest.mark.slow
def test_everything_relied_on_is_there_and_as_it_was() -> None:
    now = relied_on.collect()
    lines = relied_on.differences(now)
    assert "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in now
    assert not lines, "read what changed, then python -m tests.verl_ext.relied_on --write:\n" + "\n".join(lines)
