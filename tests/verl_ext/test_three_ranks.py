"""Three ranks: parameters, rows and targets that do not divide evenly, and FSDP2's own offload of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grail_advantage import GrailConfig, compute_token_weights
from tests.core.tiny_models import char_tokenizer, make_batch
from tests.verl_ext import three_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks
from tests.verl_ext.shared_forward_ranks import HOWS, NO_TARGET
from tests.verl_ext.test_saliency_pass import CLEAN, write_models
from tests.verl_ext.test_shared_forward import BATCH as SHARED_BATCH
from tests.verl_ext.test_shared_forward import _row

pytestmark = pytest.mark.slow

ROWS_OF_RANK = ([8, 0, 2, 5, 4, 10], [1, 3, 9, 11, 6, 7], [6, 7, 1, 11, 3, 1])
WITH_TARGET = {8, 0, 2, 5, 4, 10, 9}
"""All of the first rank's rows, one of the second's, none of the third's."""
RTOL = 1e-4
BATCH = [replace(rollout, prompt=rollout.prompt or "?") for rollout in SHARED_BATCH]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[Results]]:
    """The plain models, and what the three ranks measured."""
    folder = tmp_path_factory.mktemp("three")
    models = write_models(folder)
    rows = [_row(rollout) for rollout in BATCH]
    plan = {
        "targets": {tuple(tokens.tolist()): target for tokens, _, target in rows},
        "uneven": [
            [(*rows[row][:2], rows[row][2] if row in WITH_TARGET else NO_TARGET) for row in own] for own in ROWS_OF_RANK
        ],
    }
    torch.save(plan, folder / "plan.pt")
    return models, start_ranks("tests.verl_ext.three_ranks", folder, 3)


@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("setup", ranks.LAYOUTS)
def test_scores_and_log_probs_are_those_of_the_plain_model(
    started: tuple[dict, list[Results]], setup: str, name: str
) -> None:
    models, results = started
    layout, how = ranks.LAYOUTS[setup], HOWS[name]
    expected = compute_token_weights(
        models[layout.adapter or layout.model],
        char_tokenizer(),
        *make_batch(BATCH, padding="right").tensors(),
        GrailConfig(leaf=how.leaf, alignment="predictor", gate="all"),
        temperature=how.temperature,
    )
    lengths = make_batch(BATCH, padding="right").response_mask.sum(dim=1).tolist()
    for own, of_rank in zip(ROWS_OF_RANK, of_all_ranks(results, "layouts", setup), strict=True):
        result = of_rank[name]
        for at, row in enumerate(own):
            _, start, (_, end) = _row(BATCH[row])
            for field in ("log_probs", "entropy"):
                verl, fused = result["verl"][field][at][:-1], result["fused"][field][at][:-1]
                torch.testing.assert_close(fused, verl, rtol=RTOL, atol=RTOL)
            plain_T = expected.scores[row][make_batch(BATCH, padding="right").response_mask[row].bool()]
            assert plain_T.shape == (lengths[row],)
            scale = float(plain_T.max())
            separate = result["separate"]["saliency"][at]
            torch.testing.assert_close(separate[:-1], plain_T[: end - start], rtol=RTOL, atol=RTOL * scale)
            if row in WITH_TARGET:
                fused = result["fused"]["saliency"][at][start - 1 : end]
                torch.testing.assert_close(fused, separate, rtol=RTOL, atol=RTOL * scale)
            else:
                assert result["fused"]["saliency"][at].isnan().all()
        assert {**result["leftovers"], "held": []} == {**CLEAN, "held": []}


@pytest.mark.parametrize("setup", ranks.TRAINED)
def test_the_next_optimiser_step_is_the_same(started: tuple[dict, list[Results]], setup: str) -> None:
    _, results = started
    for result in of_all_ranks(results, "training", setup):
        assert result["fused"]["norms"] == result["verl"]["norms"]
        assert all(norm > 0 for norm in result["verl"]["norms"])
        assert all(map(torch.equal, result["fused"]["final"], result["verl"]["final"]))
