"""Saliency with LoRA on and around the embeddings, and in half precision, on two ranks against a plain model."""

from __future__ import annotations

import pytest
import torch

from grail_advantage import GrailConfig, RolloutBatch
from grail_advantage.answer_span import AnswerSpan
from grail_advantage.signals.saliency import align_scores
from grail_advantage.weighting import batch_weights
from tests.verl_ext import adapter_ranks as ranks
from tests.verl_ext import sequence_parallel_ranks as parallel
from tests.verl_ext.rank_group import start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, write_models
from tests.verl_ext.test_sequence_parallel import CHOSEN, ROWS, RTOL, Measured, deal_rows

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
SHARES = [list(range(rank, len(ROWS), WORLD_SIZE)) for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("adapters")
    models = write_models(folder)
    torch.save(deal_rows(), folder / "plan.pt")
    return Measured(models, {WORLD_SIZE: start_ranks("tests.verl_ext.adapter_ranks", folder, WORLD_SIZE)})


@pytest.mark.parametrize("name", ranks.ADAPTED)
class TestAdapters:
    """On the head, the head of a tied pair, the embeddings, and whole embeddings and head beside the adapter."""

    @pytest.mark.parametrize("how", parallel.HOWS)
    def test_both_passes_give_the_plain_adapted_models_saliency(self, measured: Measured, name: str, how: str) -> None:
        adapter, settings = ranks.ADAPTED[name].adapter, parallel.HOWS[how]
        for share, result in zip(SHARES, measured.of("adapted", name, WORLD_SIZE), strict=True):
            found = result["passes"][how]
            for at, row in enumerate(share):
                _, response_start, (_, end) = ROWS[row]
                expected_S, log_probs_S = measured.plain(adapter, row, settings.leaf, settings.temperature)
                close = {"rtol": RTOL, "atol": RTOL * float(expected_S.max())}
                torch.testing.assert_close(
                    found["separate"]["saliency"][at], expected_S[response_start - 1 : end], **close
                )
                if row in CHOSEN:
                    torch.testing.assert_close(found["fused"]["saliency"][at], expected_S, **close)
                torch.testing.assert_close(found["fused"]["log_probs"][at][:-1], log_probs_S, rtol=RTOL, atol=RTOL)
            assert {**found["leftovers"], "held": []} == {**CLEAN, "held": []}

    def test_the_next_optimiser_step_is_the_same(self, measured: Measured, name: str) -> None:
        for result in measured.of("adapted", name, WORLD_SIZE):
            assert result["after"]["norm"] == result["alone"]["norm"] > 0
            assert all(map(torch.equal, result["after"]["final"], result["alone"]["final"]))

    def test_merged_weights_for_the_rollout_are_the_same(self, measured: Measured, name: str) -> None:
        """What ``actor_rollout_ref.model.lora.merge`` sends, from a fresh engine and from one after passes."""
        for result in measured.of("adapted", name, WORLD_SIZE):
            fresh, after = result["merged"]
            assert fresh.keys() == after.keys()
            assert all(torch.equal(fresh[weight], after[weight]) for weight in fresh)
            assert result["adapters"] > 0


@pytest.mark.parametrize(
    ("name", "error"), [("head", "TypeError"), ("embeddings", "TypeError"), ("saved", "RuntimeError")]
)
def test_verl_cannot_shard_what_the_checks_refuse(measured: Measured, name: str, error: str) -> None:
    """The refusal in ``checks.py`` can go when this fails."""
    assert [result["error"] for result in measured.of("unbuilt", name, WORLD_SIZE)] == [error] * WORLD_SIZE


@pytest.mark.parametrize("name", ranks.HALVED)
class TestHalfPrecision:
    def test_weights_stay_close_to_those_of_float32(self, measured: Measured, name: str) -> None:
        """Weights lie between 0.5 and 5 with a spread of 0.5; what bfloat16 moves them by is small against that."""
        layout = ranks.HALVED[name]
        found = measured.of("halved", name, WORLD_SIZE)
        for result in found:
            assert result["autocast"] == "torch.bfloat16"
            assert result["dtypes"] == ["torch.bfloat16" if "parameters" in name else "torch.float32"]
        errors_N = weight_errors(measured, layout.model, list(zip(SHARES, found, strict=True)))
        assert 1e-4 < float(errors_N.mean()) < 0.005
        assert float(errors_N.max()) < 0.1


def weight_errors(measured: Measured, model: str, found: list[tuple[list[int], dict]]) -> torch.Tensor:
    """By how much the weights of both passes are off those of the plain model; ``found`` is a result for rows each."""
    settings, config = parallel.HOWS["one row each"], GrailConfig("official")
    errors = []
    for share, result in found:
        passes = result["passes"]["one row each"]
        for at, row in enumerate(share):
            _, response_start, (_, end) = ROWS[row]
            expected_S, _ = measured.plain(model, row, settings.leaf, settings.temperature)
            expected_T = weights_of_row(expected_S[response_start - 1 : end], row, config)
            saliencies = [passes["separate"]["saliency"][at]]
            if row in CHOSEN and passes["fused"]:
                saliencies.append(passes["fused"]["saliency"][at][response_start - 1 : end])
            errors += [(weights_of_row(saliency_P, row, config) - expected_T).abs() for saliency_P in saliencies]
    return torch.cat(errors)


def weights_of_row(saliency_P: torch.Tensor, row: int, config: GrailConfig) -> torch.Tensor:
    tokens, response_start, (start, end) = ROWS[row]
    length = len(tokens) - response_start
    start, end = start - response_start, end - response_start
    spans = [AnswerSpan(start, start, start, end)]  # no content, so that nothing but the scores makes a weight
    batch = RolloutBatch(torch.ones(1, length).bool(), torch.tensor([-1.0]), spans, {})
    scores_1T = align_scores(saliency_P, length, config.alignment).unsqueeze(0)
    return batch_weights(scores_1T, batch, config.select(batch), config).weights_BT[0, :start]
