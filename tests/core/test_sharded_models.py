"""``compute_token_weights`` with a model sharded over ranks that have different numbers of rows to compute."""

from __future__ import annotations

import pytest
import torch

from grail_advantage import compute_token_weights
from tests.core import sharded_ranks as ranks
from tests.core.tiny_models import char_tokenizer, make_batch, tiny_model
from tests.verl_ext.rank_group import start_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Starts the ranks; one without a counterpart for its collectives would hang until its time is up. Three do not divide the
    model's 16 dimensions."""
    return start_ranks("tests.core.sharded_ranks", tmp_path_factory.mktemp("sharded"), request.param)


@pytest.mark.parametrize("name", ranks.METHODS)
@pytest.mark.parametrize("share", ranks.SHARES)
@pytest.mark.parametrize("how", ranks.SHARDINGS)
def test_weights_are_those_of_the_whole_model(results: list[dict], how: str, share: str, name: str) -> None:
    for rank, result in enumerate(results):
        got = result[f"{how}: {share}: {name}"]
        assert not isinstance(got, str), got
        batch = make_batch(ranks.SHARES[share][rank])
        expected = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), ranks.METHODS[name])
        # The gradient of a divergence so small keeps three to four digits of float32's seven.
        rtol = 2e-3 if name == "oar_g" else 1e-4
        scale = float(expected.scores.nan_to_num(0).abs().max())
        torch.testing.assert_close(got["scores"], expected.scores, rtol=rtol, atol=rtol * scale, equal_nan=True)
        torch.testing.assert_close(got["weights"], expected.weights, rtol=10 * rtol, atol=10 * rtol)
