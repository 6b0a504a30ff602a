"""Behaviour that no other test saw when a deliberate fault took it away (``tests/faults.toml``)."""

from __future__ import annotations

import pytest
import torch

from grail_advantage import AnswerSpan, GrailConfig, RolloutBatch
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS
from grail_advantage.signals.policy_columns import entropy, surprisal
from grail_advantage.weighting import batch_weights


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_a_token_that_does_not_train_is_compared_with_none(preset: str) -> None:
    """Such as a tool's output between two turns of the reasoning."""
    mask_BT = torch.tensor([[1, 0, 1, 1, 1, 1, 1]]).bool()
    signal = GrailConfig(preset)
    batch = RolloutBatch(mask_BT, torch.tensor([-1.0]), [AnswerSpan(4, 5, 6, 7)], {})
    rows = signal.select(batch)
    of_tool = [1e-6, 1e6]
    weights = [
        batch_weights(torch.tensor([[1.0, score, 2.0, 4.0, 8.0, 1.0, 1.0]]), batch, rows, signal).weights_BT
        for score in of_tool
    ]
    assert torch.equal(*weights)
    assert weights[0][0, 1] == 0


def test_a_rounded_log_probability_above_0_and_entropy_below_it_count_as_0() -> None:
    columns = {OLD_LOG_PROBS: torch.tensor([[1e-4, -0.5]]), ENTROPY: torch.tensor([[-1e-4, 0.5]])}
    batch = RolloutBatch(torch.ones(1, 2).bool(), torch.tensor([1.0]), [None], columns)
    assert surprisal(batch).tolist() == [[0.0, 0.5]]
    assert entropy(batch).tolist() == [[0.0, 0.5]]
