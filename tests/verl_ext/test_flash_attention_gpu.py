"""Packed rows with the real flash attention, and Ulysses sequence parallelism over it: run where there are as many GPUs as a
layout has ranks, skipped with a reason elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.verl_ext import flash_ranks as ranks
from tests.verl_ext.rank_group import start_ranks
from tests.verl_ext.test_adapters import weight_errors
from tests.verl_ext.test_saliency_pass import write_models
from tests.verl_ext.test_sequence_parallel import Measured, deal_rows, share_rows

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU: flash attention has no CPU build"),
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn, which verl's Ulysses exchange is in"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the ranks of every size that this machine has GPUs for, and waits for all their experiments."""
    results, models = {}, {}
    for world_size in sorted({layout.ranks for layout in ranks.LAYOUTS.values() if layout.ranks <= GPUS}):
        folder = tmp_path_factory.mktemp(f"flash{world_size}")
        models = write_models(folder)
        torch.save(deal_rows(), folder / "plan.pt")
        results[world_size] = start_ranks("tests.verl_ext.flash_ranks", folder, world_size, gpus=True)
    return Measured(models, results)


@pytest.mark.parametrize("name", ranks.LAYOUTS)
def test_weights_stay_close_to_those_of_a_plain_float32_model(name: str, request: pytest.FixtureRequest) -> None:
    layout = ranks.LAYOUTS[name]
    if layout.ranks > GPUS:
        pytest.skip(f"needs {layout.ranks} GPUs, here {'is' if GPUS == 1 else 'are'} {GPUS}")
    measured: Measured = request.getfixturevalue("measured")
    shares = share_rows(layout.ranks // layout.sequence_parallel)
    found = measured.of("halved", name, layout.ranks)
    of_ranks = [(shares[rank // layout.sequence_parallel], result) for rank, result in enumerate(found)]
    errors_N = weight_errors(measured, layout.model, of_ranks)
    assert float(errors_N.mean()) < 0.005
    assert float(errors_N.max()) < 0.1
