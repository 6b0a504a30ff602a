"""Saliency on the forward of the old log-probabilities: against verl's own inference and against the separate pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grail_advantage import find_answer_span
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, encode
from tests.verl_ext import shared_forward_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, LONG, write_models

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
BATCH = [
    *(ROLLOUTS[name] for name in ("text after the box", "several boxes", "empty box", "box at the start")),
    *(ROLLOUTS[name] for name in ("one token before the box", "box at the end", "truncated second box", "right")),
    Rollout("How long can it be?", LONG + r"so \boxed{3}, I would say.<end>", -0.5),
    Rollout("And this one?", LONG[:90] + r"so \boxed{12}.<end>", -0.5),
    Rollout("", r"\boxed{1}", -0.5),
    Rollout("Ten?", r"It must be \boxed{10} then, must it not?", -0.5),
]
ROWS_OF_RANK = ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])
CHOSEN = {
    "uneven": {0, 2, 4, 6, 8, 3, 9},
    "none on one rank": {0, 4, 8},
    "all on one rank": set(ROWS_OF_RANK[1]),
    "all": set(range(len(BATCH))),
    "none": set(),
}
"""Rows with a target, see ``ranks.SHARES``."""
RTOL = 1e-4


def _row(rollout: Rollout) -> ranks.Row:
    prompt, response = encode(rollout.prompt) or encode("?"), encode(rollout.response)
    span = find_answer_span(response, char_tokenizer(), "first")
    return torch.tensor(prompt + response), len(prompt), (len(prompt) + span.start, len(prompt) + span.end)


def _plan() -> dict[str, Any]:
    rows = [_row(rollout) for rollout in BATCH]
    plan: dict[str, Any] = {"targets": {tuple(tokens.tolist()): target for tokens, _, target in rows}}
    for share in ranks.SHARES:
        plan[share] = [
            [(*rows[row][:2], rows[row][2] if row in CHOSEN[share] else ranks.NO_TARGET) for row in own]
            for own in ROWS_OF_RANK
        ]
    return plan


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("fused")
    write_models(folder)
    torch.save(_plan(), folder / "plan.pt")
    return start_ranks("tests.verl_ext.shared_forward_ranks", folder, WORLD_SIZE)


def _check(result: dict, rank: int, share: str, rtol: float = RTOL) -> None:
    """Log-probabilities and entropies are verl's, scores the separate pass's, and rows without a target have none."""
    fused, verl, separate = result["fused"], result["verl"], result["separate"]
    assert set(verl) == {"log_probs", "entropy"}
    for name, rows in verl.items():
        for found, expected in zip(fused[name], rows, strict=True):
            # The last position predicts whatever row verl put next to this one; nobody reads it.
            torch.testing.assert_close(found[:-1], expected[:-1], rtol=rtol, atol=rtol)
    seconds = [float(of_row) for of_row in fused["saliency_seconds"]]
    targets = [row in CHOSEN[share] for row in ROWS_OF_RANK[rank]]
    assert [value > 0 for value in seconds] == targets  # NaN is not
    assert len({value for value, has_target in zip(seconds, targets, strict=True) if has_target}) <= 1
    for at, row in enumerate(ROWS_OF_RANK[rank]):
        tokens, response_start, (_, end) = _row(BATCH[row])
        for name in ("saliency", "gradient_norm"):
            found = fused[name][at]
            assert found.shape == tokens.shape and found.dtype == torch.float32
            if row not in CHOSEN[share]:
                assert found.isnan().all()
                continue
            expected = separate[name][at]
            torch.testing.assert_close(
                found[response_start - 1 : end], expected, rtol=rtol, atol=rtol * float(expected.max())
            )
            assert (found[end:] == 0).all()
    assert {**result["leftovers"], "held": []} == {**CLEAN, "held": []}


@pytest.mark.parametrize("name", ranks.HOWS)
@pytest.mark.parametrize("setup", ranks.SETUPS)
def test_gives_verls_log_probs_and_the_separate_passs_scores(results: list[Results], setup: str, name: str) -> None:
    for rank, result in enumerate(of_all_ranks(results, "layouts", setup)):
        _check(result[name], rank, "uneven")
        if setup != "fsdp, unsharded between forward and backward":
            assert result[name]["leftovers"]["held"] == []


@pytest.mark.parametrize("setup", ["fsdp", "fsdp2", "fsdp2, lora"])
def test_one_row_a_micro_batch_repeats_verls_log_probs_bit_by_bit(results: list[Results], setup: str) -> None:
    """Then both see the same shapes, and what is left of a difference would be another computation."""
    for result in of_all_ranks(results, "layouts", setup):
        for name in ("log_probs", "entropy"):
            pairs = zip(result["one row each"]["fused"][name], result["one row each"]["verl"][name], strict=True)
            assert all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("setup", ranks.HALVED)
def test_under_autocast(results: list[Results], setup: str) -> None:
    """The rows of the separate pass end with the answer, which alone changes the order of sums in bfloat16."""
    for rank, result in enumerate(of_all_ranks(results, "halved", setup)):
        _check(result, rank, "uneven", rtol=0.05)


@pytest.mark.parametrize("name", ranks.SPREAD_HOWS)
@pytest.mark.parametrize("share", ranks.SHARES)
@pytest.mark.parametrize("setup", ranks.SPREAD)
def test_ranks_with_different_numbers_of_targets(results: list[Results], setup: str, share: str, name: str) -> None:
    for rank, result in enumerate(of_all_ranks(results, "spread", setup)):
        _check(result[share, name], rank, share)


@pytest.mark.parametrize("setup", ranks.TRAINED)
def test_the_next_optimiser_step_is_the_same(results: list[Results], setup: str) -> None:
    for result in of_all_ranks(results, "training", setup):
        assert result["fused"]["norms"] == result["verl"]["norms"]
        assert all(norm > 0 for norm in result["verl"]["norms"])
        assert all(map(torch.equal, result["fused"]["final"], result["verl"]["final"]))


@pytest.mark.parametrize("share", ranks.SHARES)
@pytest.mark.parametrize("setup", ranks.COUNTED)
def test_a_row_with_a_target_costs_one_forward_and_one_backward(results: list[Results], setup: str, share: str) -> None:
    """With checkpointing its forward runs once more in the backward, as in training."""
    rows = len(ROWS_OF_RANK[0])
    most = max(len(CHOSEN[share] & set(own)) for own in ROWS_OF_RANK)
    recomputed = most if ranks.COUNTED[setup].checkpointing else 0
    for result in of_all_ranks(results, "counting", setup):
        assert result[share, "verl"] == {"forwards": rows}
        found = result[share, "fused"]
        assert found["forwards"] == rows + recomputed
        assert found.get("backwards", 0) == most


@pytest.mark.parametrize("setup", ranks.RAISING)
def test_errors_leave_no_hook_and_no_mode(results: list[Results], setup: str) -> None:
    for result in of_all_ranks(results, "raising", setup):
        kinds, messages, left = zip(*result["errors"], strict=True)
        assert kinds == ("ZeroDivisionError", "ValueError")
        assert "set algorithm.token_weights.share_forward=false" in messages[1]
        for found in left:
            # An interrupted forward leaves the block that it was in as a whole.
            assert {**found, "whole": [], "held": []} == CLEAN | {"held": []}
