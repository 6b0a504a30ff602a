"""Layouts that need a kernel without a CPU build: run where there is a GPU, skipped with a reason elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from grail_advantage import GrailConfig, TokenWeights, compute_token_weights
from tests.core.tiny_models import char_tokenizer, make_batch, tiny_model
from tests.verl_ext import kernel_gpu_run as gpu
from tests.verl_ext.test_saliency_pass import BATCH, _row, _token_scores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: verl's triton kernels have no CPU build"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which verl's fused kernels are written in"),
]

ROOT = Path(__file__).parents[2]
CONFIG = GrailConfig("official")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], TokenWeights]:
    """Saliencies from the GPU by setup, and the plain computation in float32 on the CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    model = tiny_model(seed=2, hidden_size=128, intermediate_size=256, head_dim=32, initializer_range=0.1)
    model.save_pretrained(folder / "model")
    torch.save([_row(rollout, CONFIG) for rollout in BATCH], folder / "plan.pt")
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.verl_ext.kernel_gpu_run", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (folder / "result.pt").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    tensors = make_batch(BATCH, padding="right").tensors()
    plain = compute_token_weights(model, char_tokenizer(), *tensors, CONFIG, temperature=gpu.TEMPERATURE)
    return torch.load(folder / "result.pt"), plain


@pytest.mark.parametrize("setup", gpu.SETUPS)
def test_fused_kernels_give_the_plain_models_scores(measured: tuple[dict[str, Any], TokenWeights], setup: str) -> None:
    saliencies, plain = measured[0][setup], measured[1]
    if isinstance(saliencies, str):
        pytest.fail(saliencies)
    response_mask = make_batch(BATCH, padding="right").response_mask.bool()
    for row, saliency_P in enumerate(saliencies):
        expected_T = plain.scores[row, response_mask[row]]
        scores_T = _token_scores(saliency_P, CONFIG.alignment, len(expected_T))
        # A GPU may multiply float32 with 10 bits of mantissa (TF32).
        torch.testing.assert_close(scores_T, expected_T, rtol=2e-2, atol=2e-2 * float(expected_T.max()))
