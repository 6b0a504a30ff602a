"""Every pass inside verl's FSDP engine, on two and four ranks, against one process and a plain model; what passes cost, hold
and leave; errors.

The layouts are named in ``ranks.SETUPS``. Sequence parallelism has a reference attention under verl's own wrapper and its
all-to-all, as flash attention has no CPU build; that kernel itself is tested where GPUs are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import Oar, compute_token_weights
from grail_advantage.methods.saliency import Saliency
from grail_advantage.methods.shear import shear_scores
from tests.core.tiny_models import Rollout, char_tokenizer, make_batch
from tests.verl_ext import ranks
from tests.verl_ext.ranks import BATCH, FAMILIES, OWN, SETUPS, Results, Setup, of_all_ranks, start_ranks

pytestmark = pytest.mark.slow

RTOL = 1e-4


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = RTOL) -> None:
    """Equal up to a part of the largest expected value; NaN where NaN is expected."""
    scale = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * scale, equal_nan=True)


class Plain:
    """What a model says in one process, one response at a time and without sharding."""

    def __init__(self, models: dict[str, PreTrainedModel]) -> None:
        self.models = models
        self.scores = cache(self._scores)
        self.inference = cache(self._inference)

    def _scores(self, model: str, name: str, step: int = 0) -> dict[Rollout, torch.Tensor]:
        """Scores of each response's tokens."""
        signal, temperature, _ = OWN[name]
        rollouts = BATCH if name in ranks.SALIENCY else ranks.SHORT
        batch = make_batch(rollouts, padding="right")
        found = compute_token_weights(
            self.models[model], char_tokenizer(), *batch.tensors(), signal, temperature=temperature, step=step
        ).scores
        masks = batch.response_mask.bool()
        return {rollout: found[row, masks[row]] for row, rollout in enumerate(rollouts)}

    @torch.no_grad()
    def _inference(self, model: str, name: str, half: int) -> list[torch.Tensor]:
        """Log-probabilities and SHEAR's scores by hand."""
        signal, temperature, _ = OWN[name]
        _, rows = ranks.pass_rows(name, half, 2)
        log_probs, hidden = [], []
        for row in rows:
            output = self.models[model](input_ids=row.tokens[None], output_hidden_states=True)
            distribution_SV = torch.log_softmax(output.logits[0].float() / temperature, dim=-1)
            start = row.start
            log_probs.append(distribution_SV[start - 1 : -1].gather(1, row.tokens[start:, None])[:, 0])
            hidden.append(output.hidden_states[-1][0, start:])
        if name.startswith("rlsd"):
            return log_probs
        members = [index for index, row in enumerate(rows) if row.group >= 0]
        settings = {name: getattr(signal, name) for name in ("epsilon", "iterations", "tolerance")}
        right = [rows[index].advantage > 0 for index in members]
        states = [hidden[index] for index in members]
        scores = shear_scores(states, right, window=signal.window, stride=signal.stride, **settings)
        expected = [torch.ones(row.length) for row in rows]
        for index, scores_T in zip(members, scores, strict=True):
            expected[index] = scores_T
        return expected


def tolerance(signal: Any) -> float:
    """The gradient of a divergence as small as OAR-G's keeps three to four digits of float32's seven; so does a sum that
    cancels."""
    if not isinstance(signal, Oar):
        return RTOL
    return 5e-3 if signal.method == "gradient" else 5e-4


class Measured:
    """What the ranks measured, started for their number when it is asked for first, and the plain models."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plain = folder, Plain(ranks.write_models(folder))
        self._known: dict[int, list[Results]] = {}

    def of(self, kind: str, name: str, size: int = 2) -> list[Any]:
        """The results of all ranks; fails with the traceback of a rank that raised."""
        if size not in self._known:
            place = self.folder / f"of {size}"
            place.mkdir()
            for model in self.folder.iterdir():
                (place / model.name).symlink_to(model)
            self._known[size] = start_ranks("passes", place, size)
        return of_all_ranks(self._known[size], kind, name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("passes"))


def _check(plain: Plain, how: Setup, name: str, rank: int, found: dict[str, list[torch.Tensor]]) -> None:
    signal = OWN[name][0]
    rank //= how.sequence_parallel
    model = how.adapter or how.model
    rollouts, rows = ranks.pass_rows(name, rank, how.data_parallel)
    assert ("gradient_norm" in found) == (name in ranks.SALIENCY or name in ranks.GRADIENT)
    for at, (rollout, scores_T) in enumerate(zip(rollouts, found["scores"], strict=True)):
        assert scores_T.dtype == torch.float32
        if name in ranks.INFERENCE:
            close(scores_T, plain.inference(model, name, rank % 2)[at])
            continue
        expected_T = plain.scores(model, name)[rollout]
        close(scores_T, expected_T[: len(scores_T)], tolerance(signal))
        rest_T = expected_T[len(scores_T) :]
        # Nothing after the target has a saliency; with OAR it has no score.
        assert (rest_T == 0).all() if isinstance(signal, Saliency) else rest_T.isnan().all()
        assert len(scores_T) > 0 or rows[at].answer.start == 0
        if "gradient_norm" in found:
            norm_P = found["gradient_norm"][at]
            assert (norm_P[:-1] > 0).all()
            assert len(norm_P) == len(rows[at].tokens) - rows[at].start + 1
            # Nothing predicts from the last target token, so its own position has exactly no gradient.
            assert (norm_P[-1] == 0) == (name != "oar_g, port, last")


@pytest.mark.parametrize("setup", SETUPS)
class TestEverySetup:
    def test_passes_give_the_plain_models_scores(self, measured: Measured, setup: str) -> None:
        for rank, result in enumerate(measured.of("passes", setup, SETUPS[setup].ranks)):
            assert set(result["own"]) == set(ranks.passes_of(setup)) and result["grad_enabled"]
            for name, found in result["own"].items():
                _check(measured.plain, SETUPS[setup], name, rank, found)

    def test_they_leave_nothing_that_the_next_optimiser_steps_see(self, measured: Measured, setup: str) -> None:
        """Bit for bit, as the same kernels run in the same order, dropout and all; so is what an adapter is merged to."""
        results = measured.of("passes", setup, SETUPS[setup].ranks)
        for result in results:
            alone, after = result["alone"], result["after passes"]
            assert alone["norms"] == after["norms"]
            assert all(norm is None or norm > 0 for norm in alone["norms"])
            assert all(map(torch.equal, alone["final"], after["final"]))
            assert len(result["merged"]) == 2 * bool(SETUPS[setup].adapter)
            for fresh, merged in zip(result["merged"][:1], result["merged"][1:], strict=True):
                assert fresh.keys() == merged.keys() and all(torch.equal(fresh[name], merged[name]) for name in fresh)
        assert any(norm for result in results for norm in result["alone"]["norms"])


@pytest.mark.nightly
@pytest.mark.parametrize("setup", FAMILIES)
def test_every_architectures_passes_give_the_plain_models_scores_or_are_refused(measured: Measured, setup: str) -> None:
    """Refused where packed responses see each other."""
    ((holds, found),) = measured.of("family", setup, 1)
    assert holds == bool(found) == (setup not in ("qwen3_5_text, packed", "gpt_oss, packed"))
    for name, of_pass in found.items():
        _check(measured.plain, FAMILIES[setup], name, 0, of_pass)


def test_whole_blocks_are_as_few_as_in_training(measured: Measured) -> None:
    for result in measured.of("held", "fsdp2"):
        most = max(result["training"])
        assert most < 4  # training does not hold the whole model
        assert all(0 < max(held) <= most and held[-1] == 0 for held in result.values())


def test_an_error_changes_nothing_in_the_next_optimiser_step(measured: Measured) -> None:
    for (norm, final), (after, shards) in measured.of("raising", "fsdp2"):
        assert after == norm > 0 and all(map(torch.equal, shards, final))


@pytest.mark.parametrize("strategy", ranks.PLAIN)
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
    assert {name: OWN[name][0].row_cost(ranks.pass_rows(name, 0, 1)[1][0]) for name in costs} == costs
