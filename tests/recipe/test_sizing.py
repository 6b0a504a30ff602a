"""scripts/sizing.py: parameters against the real models and its arithmetic by hand."""

from __future__ import annotations

import pytest

from scripts import sizing

PUBLISHED = [596_049_920, 1_720_574_976, 3_212_749_824, 4_022_468_096, 8_190_735_360, 8_030_261_248, 8_030_261_248]
TOY = sizing.Model("toy", "run_qwen3_grail.sh", 2, 8, 2, 16, 100, True, response=976)
"""Attention 256 x 8 x (2 + 8) = 20480, MLP 3 x 8 x 16 = 384, norms 16: a block has 20880, P = 2 x 20880 + 800 + 8 =
42568."""


def test_parameters_are_those_of_the_checkpoints() -> None:
    assert [model.parameters for model in sizing.MODELS.values()] == PUBLISHED
    assert (TOY.block, TOY.parameters) == (20_880, 42_568)


def test_memory_by_hand() -> None:
    """Four GPUs, two sequences of 2000 tokens: P / N = 10642; a block's inside 32 D + 10 H d + 12 K d + 8 I = 15232 a
    token."""
    setup = sizing.Setup(2, 80, nodes=2, sequences=2, tensor_parallel=2, utilization=0.5)
    update = (16 * 10_642 + 8 * 800 + 10 * 20_880 + 4000 * (2 * 8 * 2 + 15_232 + 4 * 100)) / 1e9 + 3
    sent = (12 * 10_642 + 42_568 + 6 * 800) / 1e9 + 2.15
    wanted = [12 * 10_642e-9 + 40, sent, update, 20 * 10_642e-9 + 3]  # rollout, weights to vLLM, update, optimiser step
    assert list(sizing.phases(TOY, setup).values()) == pytest.approx(wanted)
    assert sizing.cached_tokens(TOY, setup) == (40e9 - 42_568 - 2e9 - 12 * 256 * 100) * 2 / (4 * 2 * 8 * 128)
    assert sizing.host_memory(TOY, setup) == pytest.approx(15 + 16 + 2 * 4 * 42_568e-9)
