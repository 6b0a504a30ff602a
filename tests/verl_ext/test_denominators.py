"""docs/denominators.md: what verl's loss divides by, against sums by hand over micro-batches of two ranks."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

LENGTHS = [3, 5, 0, 2]
"""Tokens that train of each row; the third is rejected."""
LOSSES = [[1.0, -2.0, 4.0], [0.5, 0.5, -1.0, 2.0, 8.0], [], [16.0, -32.0]]
RANKS = [[0, 1], [2, 3]]
SCALE = 10


def by_verl(mode: str, loss_scale_factor: int | None = SCALE) -> float:
    """The loss whose gradient FSDP makes: the ranks' mean of each one's sum over micro-batches of one row."""
    total = 0.0
    for rank in RANKS:
        for row in rank:
            width = max(LENGTHS[row], 1)
            loss_BT, mask_BT = torch.zeros(1, width), torch.zeros(1, width)
            loss_BT[0, : LENGTHS[row]], mask_BT[0, : LENGTHS[row]] = torch.tensor(LOSSES[row]), 1.0
            total += agg_loss(
                loss_BT,
                mask_BT,
                mode,
                dp_size=len(RANKS),
                batch_num_tokens=sum(LENGTHS),
                global_batch_size=len(LENGTHS),
                loss_scale_factor=loss_scale_factor,
            ).item()
    return total / len(RANKS)


def test_the_table_of_the_page() -> None:
    tokens, rows = sum(map(sum, LOSSES)), len(LENGTHS)
    assert by_verl("token-mean") == pytest.approx(tokens / 10)
    assert by_verl("seq-mean-token-sum") == pytest.approx(tokens / rows)
    assert by_verl("seq-mean-token-sum-norm") == pytest.approx(tokens / rows / SCALE)
    means = [sum(losses) / len(losses) for losses in LOSSES if losses]
    assert by_verl("seq-mean-token-mean") == pytest.approx(sum(means) / rows)


def test_without_a_scale_each_micro_batch_is_divided_by_its_longest_response() -> None:
    means = [sum(losses) / len(losses) for losses in LOSSES if losses]
    assert by_verl("seq-mean-token-sum-norm", None) == pytest.approx(sum(means) / len(LENGTHS))
