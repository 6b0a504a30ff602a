"""Layouts that need a kernel without a CPU build: run where there is a GPU, skipped with a reason elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.verl_ext import pass_plan as plan
from tests.verl_ext.test_pass_details import Measured
from tests.verl_ext.test_passes import close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: verl's triton kernels have no CPU build"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which verl's fused kernels are written in"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("gpu"), (1,), gpus=True)


@pytest.mark.parametrize("setup", plan.KERNELS)
def test_fused_kernels_give_the_plain_models_scores(measured: Measured, setup: str) -> None:
    """A GPU may multiply float32 with 10 bits of mantissa (TF32)."""
    (scores,) = measured.of("kernels", setup, 1)
    rollouts, _ = plan.pass_rows("saliency, robust", 0, 1)
    for rollout, scores_T in zip(rollouts, scores, strict=True):
        expected_T = measured.plain.scores("wide", "saliency, robust")[rollout]
        close(scores_T, expected_T[: len(scores_T)], rtol=2e-2)
