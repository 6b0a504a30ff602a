"""Ulysses sequence parallelism with the real flash attention: run where there are two GPUs, skipped with a reason elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.verl_ext import flash_ranks as ranks
from tests.verl_ext.rank_group import start_ranks
from tests.verl_ext.test_adapters import weight_errors
from tests.verl_ext.test_saliency_pass import write_models
from tests.verl_ext.test_sequence_parallel import Measured, deal_rows, share_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: flash attention has no CPU build"),
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn, which verl's Ulysses exchange is in"),
]
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("flash")
    models = write_models(folder)
    torch.save(deal_rows(), folder / "plan.pt")
    return Measured(models, {WORLD_SIZE: start_ranks("tests.verl_ext.flash_ranks", folder, WORLD_SIZE, gpus=True)})


@pytest.mark.parametrize("name", ranks.LAYOUTS)
def test_weights_stay_close_to_those_of_a_plain_float32_model(measured: Measured, name: str) -> None:
    layout = ranks.LAYOUTS[name]
    shares = share_rows(layout.ranks // layout.sequence_parallel)
    found = measured.of("halved", name, WORLD_SIZE)
    of_ranks = [(shares[rank // layout.sequence_parallel], result) for rank, result in enumerate(found)]
    errors_N = weight_errors(measured, layout.model, of_ranks)
    assert float(errors_N.mean()) < 0.005
    assert float(errors_N.max()) < 0.1
