"""What passes cost, hold and leave on two ranks; responses and their way back; errors; half precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl_ext import pass_plan as plan
from tests.verl_ext.pass_plan import OWN, TARGETS
from tests.verl_ext.plain_model import RTOL, Plain, log_errors
from tests.verl_ext.rank_group import of_all_ranks, start_ranks
from tests.verl_ext.test_passes import CLEAN

pytestmark = pytest.mark.slow


class Measured:
    """What two ranks measured, and the plain models."""

    def __init__(self, folder: Path) -> None:
        self.plain = Plain(plan.write_models(folder))
        self._results = start_ranks("tests.verl_ext.detail_ranks", folder, 2)

    def of(self, kind: str, name: str) -> list[Any]:
        """The results of all ranks; fails with the traceback of a rank that raised."""
        return of_all_ranks(self._results, kind, name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("details"))


@pytest.mark.parametrize("setup", plan.MEMORY)
def test_whole_blocks_are_as_few_as_in_training(measured: Measured, setup: str) -> None:
    for blocks in measured.of("memory", setup):
        most = max(blocks["training"]["during"])
        assert most < 4  # training does not hold the whole model
        for name in ("embeddings", "middle", "shared"):
            assert 0 < max(blocks[name]["during"], default=0) <= most
        assert all(of_run["behind"] == [] for of_run in blocks.values())


@pytest.mark.parametrize("setup", plan.COUNTED)
class TestForwards:
    """With checkpointing a block's forward runs once more in a backward, as in training."""

    def test_a_pass_recomputes_the_blocks_that_the_backward_passes(self, measured: Measured, setup: str) -> None:
        behind = {"embeddings": [1, 1, 1, 1], "first": [0, 1, 1, 1], "middle": [0, 0, 1, 1], "last": [0, 0, 0, 1]}
        for result in measured.of("counting", setup):
            for leaf, recomputed in behind.items():
                assert result[leaf] == [1 + times for times in recomputed]

    def test_a_row_with_a_target_costs_one_forward_and_one_backward(self, measured: Measured, setup: str) -> None:
        for share, targets in TARGETS.items():
            most = max(len(targets & set(range(rank, 12, 2))) for rank in (0, 1))
            for result in measured.of("counting", setup):
                assert result["verl", share] == [6] * 4
                assert result["shared", share] == [6 + most] * 4

    def test_ranks_with_very_different_rows_run_as_many(self, measured: Measured, setup: str) -> None:
        long = [row.tokens for row in map(lambda row: OWN["oar_p"][0].prepare(row, None), plan.uneven_rows(0))]
        # A clean forward, and 90 counterfactuals that share micro-batches of 190 tokens.
        perturbed = sum(1 + -(-90 // (190 // (len(tokens_S) - 1))) for tokens_S in long)
        for result in measured.of("counting", setup):
            assert result["uneven", "saliency"] == [2 * 2] * 4
            assert result["uneven", "oar_p"] == [perturbed] * 4


ERRORS = {
    "leaf": "KeyError",
    "token": "IndexError",
    "block": "ZeroDivisionError",
    "shared block": "ZeroDivisionError",
    "logits": "ValueError",
}


def test_errors_leave_no_hook_no_mode_and_the_next_optimiser_step(measured: Measured) -> None:
    """An unknown activation, a token outside the vocabulary, a block that fails on all ranks, logits that the model changes."""
    for result in measured.of("raising", "fsdp2"):
        assert {name: kind for name, kind, _ in result["errors"]} == ERRORS
        assert "set algorithm.token_weights.share_forward=false" in result["errors"][-1][2]
        for name in ERRORS:  # an interrupted forward leaves the block that it was in as a whole
            assert {**result["left"][name], "whole": [], "held": []} == CLEAN
        (norm, final), *others = result["steps"]
        assert norm > 0 and len(others) == len(ERRORS)
        for found, shards in others:
            assert found == norm and all(map(torch.equal, shards, final))


@pytest.mark.parametrize("name", plan.HALVED)
class TestHalfPrecision:
    def test_saliencies_stay_close_to_those_of_float32(self, measured: Measured, name: str) -> None:
        """By the rounding of bfloat16, which has 8 bits: not equal, and for most tokens within a tenth."""
        found = measured.of("halved", name)
        for result in found:
            assert result["autocast"] == "torch.bfloat16"
            assert result["dtypes"] == ["torch.float32"]
        assert 1e-4 < float(log_errors(measured.plain, found, plan.HALVED[name]).median()) < math.log(1.1)

    def test_other_passes_use_it_too(self, measured: Measured, name: str) -> None:
        """bfloat16 rounds the answer by more than OAR-G's noise moves it, so that is only asked for finite numbers."""
        model = plan.HALVED[name].model
        for rank, result in enumerate(measured.of("halved", name)):
            own = result["own"]
            assert all(scores.isfinite().all() for scores in own["oar_g"]["scores"])
            rollouts, _ = plan.pass_rows("oar_p", rank, 2)
            pairs = [
                (scores_T, measured.plain.scores(model, "oar_p")[rollout][: len(scores_T)])
                for rollout, scores_T in zip(rollouts, own["oar_p"]["scores"], strict=True)
            ]
            found, expected = (torch.cat(part) for part in zip(*pairs, strict=True))
            assert not torch.allclose(found, expected, rtol=1e-4, atol=0)
            assert float(torch.corrcoef(torch.stack([found, expected]))[0, 1]) > 0.8
            for inference in ("rlsd", "shear"):
                expected = torch.cat(measured.plain.inference(model, inference, rank))
                errors = (torch.cat(own[inference]["scores"]) - expected).abs()
                assert float(errors.max()) > 1e-5 and float(errors.median()) < 0.1


def test_rows_with_nan_logits_leave_the_others_alone(measured: Measured) -> None:
    touched = 0
    for texts, result in zip(plan.WITH_NAN, measured.of("nan", "fsdp2"), strict=True):
        for row, text in enumerate(texts):
            end = len("Is") + text.index("}") + 1
            found, clean = result["nan"]["saliency"][row][:end], result["clean"]["saliency"][row][:end]
            assert clean.isfinite().all()
            if plan.NAN_TOKEN in text:
                touched += 1
                assert found.isnan().any() or text.endswith(plan.NAN_TOKEN)
            else:
                torch.testing.assert_close(found, clean, rtol=RTOL, atol=RTOL)
    assert touched == 2


@pytest.mark.parametrize("strategy", plan.PLAIN)
def test_a_later_update_of_a_step_weighs_by_the_steps_first_policy(measured: Measured, strategy: str) -> None:
    """``separate_async`` with ``parameter_sync_step`` above 1: the actor has moved, the old log-probabilities have not. Bypass
    takes the policy as it is. The policy is put back, after an error too, and nothing is kept."""
    for result in measured.of("later_update", strategy):
        first = result["first"]
        torch.testing.assert_close(result["decoupled"], first, rtol=2e-4, atol=1e-6)
        assert not torch.allclose(result["bypass"], first, rtol=1e-2)
        assert set(result["calls with bypass"]) == {"compute_token_scores"}
        assert len(result["back"]) == 4 and all(result["back"]) and result["kept policies"] == [0]


def test_cost_of_a_row_for_sharing_out() -> None:
    # "text after the box": 15 prompt tokens, 19 reasoning tokens, 9 of the box, 17 after it
    costs = {"oar_g": 43, "oar_g, port, last": 60, "oar_p": 43 * 19, "oar_p, few, joint": 43 * 7}
    assert {name: OWN[name][0].row_cost(plan.pass_rows(name, 0, 1)[1][0]) for name in costs} == costs
