"""Passes without gradients inside verl's FSDP engine, on two ranks, against one process and a plain model.

RLSD asks for the log-probabilities of the response under whatever prompt it made, SHEAR for hidden states, a group on a rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import find_answer_span
from grail_advantage.batch import PassRow
from grail_advantage.signals.shear_distances import EPSILON, ITERATIONS, TOLERANCE, shear_scores
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, encode
from tests.verl_ext import inference_pass_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, LONG, write_models

pytestmark = pytest.mark.slow

GROUPS = (
    [*(ROLLOUTS[name] for name in ("right", "text after the box", "no box")), Rollout("How long?", LONG, 1.0)],
    [*(ROLLOUTS[name] for name in ("several boxes", "right, several boxes")), *(ROLLOUTS["empty box"],) * 2],
)
"""The rows of each rank; the last of the second one fills it up."""


def _rows(rank: int) -> list[PassRow]:
    rows = []
    for place, rollout in enumerate(GROUPS[rank]):
        prompt, response = encode(rollout.prompt), encode(rollout.response)
        span = find_answer_span(response, char_tokenizer(), "last")
        group = -1 if (rank, place) == (1, 3) else rank
        tokens = torch.tensor(prompt + response)
        rows.append(PassRow(tokens, len(prompt), len(response), span, rollout.advantage, group, place))
    return rows


class Measured:
    """What both ranks measured, and what a plain model says."""

    def __init__(self, models: dict[str, PreTrainedModel], results: list[Results]) -> None:
        self.models = models
        self.results = results

    def of(self, kind: str, setup: str) -> list[Any]:
        """The results of both ranks; fails with the traceback of a rank that raised."""
        return of_all_ranks(self.results, kind, setup)

    @torch.no_grad()
    def plain(self, model: str, signal: str, rank: int) -> list[torch.Tensor]:
        """Log-probabilities and SHEAR's scores by hand, one row at a time."""
        log_probs, hidden = [], []
        for row in _rows(rank):
            output = self.models[model](input_ids=row.tokens_S[None], output_hidden_states=True)
            distribution_SV = torch.log_softmax(output.logits[0].float() / ranks.TEMPERATURE, dim=-1)
            start = row.response_start
            log_probs.append(distribution_SV[start - 1 : -1].gather(1, row.tokens_S[start:, None])[:, 0])
            hidden.append(output.hidden_states[-1][0, start:])
        if signal == "rlsd":
            return log_probs
        members = [index for index, row in enumerate(_rows(rank)) if row.group >= 0]
        config = ranks.SIGNALS["shear"]
        scores = shear_scores(
            [hidden[index] for index in members],
            [_rows(rank)[index].advantage > 0 for index in members],
            window=config.window,
            stride=config.stride,
            epsilon=EPSILON,
            iterations=ITERATIONS,
            tolerance=TOLERANCE,
        )
        expected = [torch.ones(row.response_length) for row in _rows(rank)]
        for index, scores_T in zip(members, scores, strict=True):
            expected[index] = scores_T
        return expected


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("inference")
    models = write_models(folder)
    torch.save([_rows(rank) for rank in range(ranks.WORLD_SIZE)], folder / "plan.pt")
    return Measured(models, start_ranks("tests.verl_ext.inference_pass_ranks", folder, ranks.WORLD_SIZE))


@pytest.mark.parametrize("how", ranks.HOWS)
@pytest.mark.parametrize("signal", ranks.SIGNALS)
@pytest.mark.parametrize("setup", ranks.SETUPS)
def test_gives_the_plain_models_scores(measured: Measured, setup: str, signal: str, how: str) -> None:
    built = ranks.SETUPS[setup]
    for rank, result in enumerate(measured.of("passes", setup)):
        expected = measured.plain(built.adapter or built.model, signal, rank)
        for scores_T, expected_T in zip(result["scores"][signal, how], expected, strict=True):
            torch.testing.assert_close(scores_T, expected_T, rtol=1e-4, atol=1e-5)


def test_a_row_longer_than_the_budget_is_there() -> None:
    """What the kind "budget" stands on."""
    assert max(len(row.tokens_S) for row in _rows(0)) > ranks.HOWS["budget"]["budget"]
    assert max(len(row.tokens_S) for row in _rows(1)) < ranks.HOWS["budget"]["budget"]


@pytest.mark.parametrize("setup", ranks.SETUPS)
def test_leaves_nothing_behind(measured: Measured, setup: str) -> None:
    for result in measured.of("passes", setup):
        assert {**result["leftovers"], "whole": [], "held": []} == {**CLEAN, "held": []}


@pytest.mark.parametrize("setup", ranks.FUSED)
def test_fused_kernels_give_log_probs(measured: Measured, setup: str) -> None:
    for rank, scores in enumerate(measured.of("fused", setup)):
        for scores_T, expected_T in zip(scores, measured.plain("llama-tied", "rlsd", rank), strict=True):
            torch.testing.assert_close(scores_T, expected_T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("setup", ranks.HALVED)
def test_autocast_of_the_training_step_is_used(measured: Measured, setup: str) -> None:
    for rank, result in enumerate(measured.of("halved", setup)):
        for signal, scores in result.items():
            errors = []
            for scores_T, expected_T in zip(scores, measured.plain("qwen3", signal, rank), strict=True):
                errors.append((scores_T - expected_T).abs())
            errors = torch.cat(errors)
            assert float(errors.max()) > 1e-5 and float(errors.median()) < 0.05


@pytest.mark.parametrize("setup", ranks.TRAINED)
def test_next_optimiser_step_is_the_same_after_passes(measured: Measured, setup: str) -> None:
    for result in measured.of("training", setup):
        assert result["after passes"]["norms"] == result["alone"]["norms"]
        assert all(norm > 0 for norm in result["alone"]["norms"])
        assert all(map(torch.equal, result["after passes"]["final"], result["alone"]["final"]))
