"""Behaviour that no other test saw when a deliberate fault took it away (``tests/faults.toml``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grail_advantage import AnswerSpan, GrailConfig, RolloutBatch
from grail_advantage.view.dump.files import DumpHeader, read_dump, write_step
from grail_advantage.weighting import batch_weights
from tests.dumps import dump_row


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_a_token_that_does_not_train_is_compared_with_none(preset: str) -> None:
    """Such as a tool's output between two turns of the reasoning."""
    signal = GrailConfig(preset)

    def weights(scores: list[float], mask: list[int], span: AnswerSpan) -> torch.Tensor:
        batch = RolloutBatch(torch.tensor([mask]).bool(), torch.tensor([-1.0]), [span], {})
        return batch_weights(torch.tensor([scores]), batch, signal.select(batch), signal).weights_BT[0]

    plain = weights([9.0, 2.0, 4.0, 8.0, 7.0, 6.0], [1] * 6, AnswerSpan(3, 4, 5, 6))
    found = weights([9.0, 5.0, 2.0, 4.0, 8.0, 7.0, 6.0], [1, 0, 1, 1, 1, 1, 1], AnswerSpan(4, 5, 6, 7))
    assert found[1] == 0
    assert torch.equal(found[[0, 2, 3, 4, 5, 6]], plain)


def test_a_weight_that_was_changed_in_a_dump_is_not_read(tmp_path: Path) -> None:
    """Bits without a pattern stand in the file as they are, so that one of them can be changed in place."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1000, dtype=np.uint32).view(np.float32)
    weight_T = np.where(np.isfinite(bits), bits, np.float32(1))
    path = write_step(tmp_path, DumpHeader(step=1, method="grail"), [dump_row(weight_T)])
    content = bytearray(path.read_bytes())
    place = content.find(weight_T[500:510].tobytes())
    assert place > 0
    content[place] ^= 1
    path.write_bytes(content)
    dump = read_dump(tmp_path)
    assert list(dump) == []
    assert str(path) in str(dump.problems[0])
