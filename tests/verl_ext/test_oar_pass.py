"""OAR's passes inside verl's FSDP engine on two ranks against one process and a plain model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from grail_advantage import OarConfig, TokenWeights, compute_token_weights, find_answer_span
from grail_advantage.batch import PassRow
from tests.core.tiny_models import PAD_ID, ROLLOUTS, Rollout, char_tokenizer, encode, make_batch
from tests.verl_ext import oar_pass_ranks as ranks
from tests.verl_ext.rank_group import of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, LONG, trainer_batch, write_models

pytestmark = pytest.mark.slow

BATCH = [
    *(ROLLOUTS[name] for name in ("text after the box", "several boxes", "right", "empty box")),
    *(ROLLOUTS[name] for name in ("one token before the box", "box at the end")),
    Rollout("How long can it be?", LONG[:80] + r"so \boxed{3}.<end>", -0.5),
]
SHORTEST = 4
SHARES = ([0, 2, 4, 6], [1, 3, 5, SHORTEST])
"""Places in BATCH of each rank's rows; the last of the second rank fills it up, as the trainer does."""
UNBALANCED = (
    [Rollout("How long?" + "?" * extra, LONG[:90] + r"\boxed{3}", -1.0) for extra in range(2)],
    [Rollout("Six" + "?" * extra, r"=\boxed{6}", -1.0) for extra in range(2)],
)
TRAINER_BATCH = [
    *(ROLLOUTS[name] for name in ("no box", "box at the start")),
    *BATCH[:3],
    dataclasses.replace(BATCH[0], advantage=0.0),
    *BATCH[3:],
]


def _row(rollout: Rollout, place: int) -> PassRow:
    prompt, response = encode(rollout.prompt), encode(rollout.response)
    span = find_answer_span(response, char_tokenizer(), "last")
    return PassRow(torch.tensor(prompt + response), len(prompt), len(response), span, rollout.advantage, 0, place)


class Measured:
    """What both ranks measured, and the plain models."""

    def __init__(self, models: dict, results: list[dict]) -> None:
        self.models = models
        self.results = results
        self._known: dict[tuple, TokenWeights] = {}

    def of(self, kind: str, setup: str) -> list[dict]:
        """The results of both ranks; fails with the traceback of a rank that raised."""
        return of_all_ranks(self.results, kind, setup)

    def plain(self, model: str, config: OarConfig, rollouts: list[Rollout]) -> list[torch.Tensor]:
        """The scores of each response in one process, one row at a time and without sharding."""
        key = (model, config, tuple(rollouts))
        batch = make_batch(rollouts, padding="right")
        if key not in self._known:
            self._known[key] = compute_token_weights(self.models[model], char_tokenizer(), *batch.tensors(), config)
        scores = self._known[key].scores
        return [scores[row, batch.response_mask[row].bool()] for row in range(len(rollouts))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the two ranks and waits for all their experiments."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    models = write_models(folder)
    assert ranks.PAD_TOKEN == PAD_ID == char_tokenizer().pad_token_id
    rows = [_row(rollout, place) for place, rollout in enumerate(BATCH)]
    plan = {
        "even": [[rows[place] for place in share] for share in SHARES],
        "unbalanced": [[_row(rollout, place) for place, rollout in enumerate(share)] for share in UNBALANCED],
        "training": [[(rows[place].tokens_S, rows[place].response_start) for place in share] for share in SHARES],
        "trainer": trainer_batch(TRAINER_BATCH),
    }
    torch.save(plan, folder / "plan.pt")
    return Measured(models, start_ranks("tests.verl_ext.oar_pass_ranks", folder, ranks.WORLD_SIZE))


def _tolerance(config: OarConfig) -> float:
    """The gradient of a divergence so small keeps three to four digits of float32's seven, and so does a sum that cancels."""
    return 5e-3 if config.method == "gradient" else 2e-4


def _assert_scores_agree(scores_T: torch.Tensor, expected_T: torch.Tensor, config: OarConfig) -> None:
    """The scored tokens, which come first, agree; the others have none."""
    expected = expected_T[: len(scores_T)]
    assert expected_T[len(scores_T) :].isnan().all()
    rtol = _tolerance(config)
    torch.testing.assert_close(scores_T, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


CASES = [(setup, name) for setup in ranks.SETUPS for name in ranks.PASSES]


@pytest.mark.parametrize(("setup", "name"), CASES, ids=[f"{setup}: {name}" for setup, name in CASES])
class TestPass:
    def test_gives_the_plain_models_scores(self, measured: Measured, setup: str, name: str) -> None:
        config, built = ranks.PASSES[name].config, ranks.SETUPS[setup]
        expected = measured.plain(built.adapter or built.model, config, BATCH)
        for share, result in zip(SHARES, measured.of("passes", setup), strict=True):
            rows = result[name]["rows"]
            for place, scores_T in zip(share, rows["scores"], strict=True):
                assert scores_T.dtype == torch.float32
                _assert_scores_agree(scores_T, expected[place], config)
            assert ("gradient_norm" in rows) == (config.method == "gradient")

    def test_leaves_nothing_behind(self, measured: Measured, setup: str, name: str) -> None:
        gradient = ranks.PASSES[name].config.method == "gradient"
        for result in measured.of("passes", setup):
            left = dict(result[name]["leftovers"])
            held, whole = left.pop("held"), left.pop("whole")
            if gradient:
                assert held == whole == []
            assert left == {name: value for name, value in CLEAN.items() if name != "whole"}


def test_gradient_norms_are_those_of_the_positions_from_the_first_predictor_on(measured: Measured) -> None:
    for share, result in zip(SHARES, measured.of("passes", "fsdp2"), strict=True):
        norms = result["gradient, one row each"]["rows"]["gradient_norm"]
        for place, norm_P in zip(share, norms, strict=True):
            row = _row(BATCH[place], place)
            assert norm_P.shape == (row.span.end + 1,)
            assert (norm_P[:-1] > 0).all()
            assert norm_P[-1] == 0  # nothing predicts from the last answer token


def test_noise_is_that_of_the_step_and_the_rows_tokens(measured: Measured) -> None:
    """In the ranks' order of the rows and in the opposite one of a single process."""
    for name, step in (("first", 1), ("again", 1), ("second", 2)):
        batch = make_batch(BATCH[::-1], padding="right")
        found = compute_token_weights(
            measured.models["qwen3"], char_tokenizer(), *batch.tensors(), OarConfig(), step=step
        )
        expected = [scores[mask.bool()] for scores, mask in zip(found.scores, batch.response_mask, strict=True)][::-1]
        for share, result in zip(SHARES, measured.of("steps", "fsdp2"), strict=True):
            for place, scores_T in zip(share, result[name]["scores"], strict=True):
                _assert_scores_agree(scores_T, expected[place], OarConfig())
    for result in measured.of("steps", "fsdp2"):
        assert all(map(torch.equal, result["first"]["scores"], result["again"]["scores"]))
        assert not any(map(torch.allclose, result["first"]["scores"], result["second"]["scores"]))


@pytest.mark.parametrize("setup", ranks.TRAINED)
def test_next_optimiser_step_is_the_same_after_passes(measured: Measured, setup: str) -> None:
    for result in measured.of("training", setup):
        assert result["after passes"]["norms"] == result["alone"]["norms"]
        assert all(norm > 0 for norm in result["alone"]["norms"])
        assert all(map(torch.equal, result["after passes"]["final"], result["alone"]["final"]))


@pytest.mark.parametrize("setup", ranks.UNBALANCED)
def test_ranks_with_very_different_rows_run_as_many_forwards(measured: Measured, setup: str) -> None:
    results = measured.of("unbalanced", setup)
    forwards = [result["forwards"] for result in results]
    # Rows of 98 and 99 tokens that matter, 90 counterfactuals each: a clean forward and 12 of 8, and with the first row one
    # of 10.
    lengths = [row.response_start + row.span.end - 1 for row in (_row(rollout, 0) for rollout in UNBALANCED[0])]
    assert forwards == [sum(1 + -(-90 // (800 // length)) for length in lengths)] * 2
    for rank, result in enumerate(results):
        expected = measured.plain("qwen3", OarConfig("perturbation"), UNBALANCED[rank])
        for scores_T, expected_T in zip(result["scores"], expected, strict=True):
            _assert_scores_agree(scores_T, expected_T, OarConfig("perturbation"))


def test_first_rank_shows_the_progress_of_a_pass_that_takes_its_time(measured: Measured) -> None:
    first, second = measured.of("progress", "fsdp2")
    own = sum(_row(BATCH[place], place).span.start for place in SHARES[0])
    assert f"{own}/{own}" in first["at once"]
    assert "OAR-P, rank 0:" in first["at once"]
    assert first["later"] == second["at once"] == second["later"] == ""


@pytest.mark.parametrize("setup", ranks.HALVED)
def test_autocast_of_the_training_step_is_used(measured: Measured, setup: str) -> None:
    """bfloat16 rounds the answer by more than the noise moves it, so OAR-G is only asked for finite numbers."""
    config = OarConfig("perturbation")
    expected = measured.plain("qwen3", config, BATCH)
    for share, result in zip(SHARES, measured.of("half_precision", setup), strict=True):
        assert all(scores.isfinite().all() for scores in result["gradient, one row each"]["scores"])
        for place, scores_T in zip(share, result["perturbation, five at a time"]["scores"], strict=True):
            expected_T = expected[place][: len(scores_T)]
            assert not torch.allclose(scores_T, expected_T, rtol=1e-4, atol=0)
            if len(scores_T) > 8:
                assert float(torch.corrcoef(torch.stack([scores_T, expected_T]))[0, 1]) > 0.9


@pytest.mark.parametrize("name", ["gradient", "perturbation"])
def test_trainer_puts_every_row_back_in_its_place(measured: Measured, name: str) -> None:
    """From a batch to scores through the trainer's and the worker's own code, with a row that fills up a rank."""
    config = ranks.EXPERIMENTS["trainer"][name]
    batch = make_batch(TRAINER_BATCH, padding="right")
    expected = compute_token_weights(measured.models["qwen3"], char_tokenizer(), *batch.tensors(), config, step=5)
    # The whole response has scores with GRAIL's port, so that a box at its start needs some too.
    selected = torch.tensor([span is not None and (span.start > 0 or name == "gradient") for span in expected.spans])
    selected &= batch.advantages != 0
    assert int(selected.sum()) == len(BATCH) + (name == "gradient")
    for result in measured.of("trainer", name):
        assert (len(result["norms"]) > 0) == (name == "gradient")
        for row, length in enumerate(batch.response_mask.sum(dim=1).tolist()):
            scores_T = result["scores"][row]
            if not selected[row]:
                assert scores_T.isnan().all()
                continue
            scored = length if name == "gradient" else expected.spans[row].start
            expected_T = expected.scores[row, batch.response_mask[row].bool()]
            assert scores_T[scored:].isnan().all()
            _assert_scores_agree(scores_T[:scored], expected_T, config)
    shares = [result["rows_of_rank"] for result in measured.of("trainer", name)]
    assert [len(share) for share in shares] == [4, 4]


def test_cost_of_a_row() -> None:
    row = _row(ROLLOUTS["text after the box"], 0)  # 15 prompt tokens, 19 reasoning tokens, 9 of the box, 17 behind
    assert OarConfig().row_cost(row) == 43
    assert OarConfig(probe="last").row_cost(row) == 15 + row.response_length
    assert OarConfig("perturbation").row_cost(row) == 43 * 19
    assert OarConfig("perturbation", max_perturbations=5).row_cost(row) == 43 * 5
