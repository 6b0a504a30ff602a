"""Packed rows with the real flash attention, and Ulysses sequence parallelism over it: run where there are as many GPUs as a
layout has ranks, skipped with a reason elsewhere."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch

from tests.verl_ext.pass_plan import FLASH
from tests.verl_ext.test_pass_details import Measured, log_errors

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU: flash attention has no CPU build"),
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn, which verl's Ulysses exchange is in"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the ranks of every size that this machine has GPUs for, and waits for all their experiments."""
    sizes = tuple(sorted({layout.ranks for layout in FLASH.values() if layout.ranks <= GPUS}))
    return Measured(tmp_path_factory.mktemp("flash"), sizes, gpus=True)


@pytest.mark.parametrize("name", FLASH)
def test_saliencies_stay_close_to_those_of_a_plain_float32_model(name: str, request: pytest.FixtureRequest) -> None:
    layout = FLASH[name]
    if layout.ranks > GPUS:
        pytest.skip(f"needs {layout.ranks} GPUs, here {'is' if GPUS == 1 else 'are'} {GPUS}")
    measured: Measured = request.getfixturevalue("measured")
    found = measured.of("halved", name, layout.ranks)
    assert float(log_errors(measured, found, layout).median()) < math.log(1.1)
