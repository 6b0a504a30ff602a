"""Every pass inside verl's FSDP engine, on two and four ranks, against one process and a plain model; what passes hold
and leave.

The layouts are named in ``ranks.SETUPS``. Sequence parallelism has a reference attention under verl's own wrapper and its
all-to-all, as flash attention has no CPU build; that kernel itself is tested where GPUs are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import Oar
from grail_advantage.data import RowScores
from grail_advantage.model.hugging_face import HuggingFaceModel
from tests.core.tiny_models import char_tokenizer
from tests.verl_ext import ranks
from tests.verl_ext.ranks import FAMILIES, OWN, SETUPS, Results, Setup, start_ranks

pytestmark = pytest.mark.slow


class Measured:
    """What the ranks measured, started for their number when it is asked for first, and the plain models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = ranks.write_models(folder)
        self._known: dict[int, list[Results]] = {}

    def of(self, kind: str, name: str, size: int = 2) -> list[Any]:
        """The results of all ranks."""
        if size not in self._known:
            place = self.folder / f"of {size}"
            place.mkdir()
            for model in self.models:
                (place / model).symlink_to(self.folder / model)
            self._known[size] = start_ranks(str(size), place, size)
        return [result[kind][name] for result in self._known[size]]

    def check(
        self, how: Setup, name: str, rank: int, measured_values: dict[str, list[torch.Tensor]]
    ) -> None:
        """That a pass on a rank gave what the plain model gives, in one process and one response at a time."""
        signal, temperature, _ = OWN[name]
        _, rows = ranks.pass_rows(name, rank // how.sequence_parallel, how.data_parallel)
        expected = plain_scores(self.models[how.adapter or how.model], signal, temperature, rows)
        assert ("gradient_norm" in measured_values) == all(
            row_scores.norms is not None for row_scores in expected
        )
        # The gradient of a divergence as small as OAR-G's keeps three to four digits of float32's seven; so does a sum that
        # cancels.
        rtol = (
            {"gradient": 5e-3, "perturbation": 5e-4}[signal.method]
            if isinstance(signal, Oar)
            else 1e-4
        )
        for at, row_scores in enumerate(expected):
            for name, values in (
                ("scores", row_scores.scores),
                ("gradient_norm", row_scores.norms),
            ):
                if name in measured_values:
                    atol = rtol * float(values.nan_to_num().abs().amax()) if len(values) else 0.0
                    measured, rest = measured_values[name][at].tensor_split([len(values)])
                    torch.testing.assert_close(
                        measured, values.float(), rtol=rtol, atol=atol, equal_nan=True
                    )
                    assert not rest.any()  # of the last token, from which nothing is predicted


def plain_scores(
    model: PreTrainedModel, signal: Any, temperature: float, rows: list[Any]
) -> list[RowScores]:
    how = {"group": None, "step": 0, "tokens": 1}
    return signal.run(
        rows, HuggingFaceModel(model, char_tokenizer(), temperature, torch.device("cpu"), **how)
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("passes"))


@pytest.mark.parametrize("setup", SETUPS)
class TestEverySetup:
    def test_passes_give_the_plain_models_scores(self, measured: Measured, setup: str) -> None:
        for rank, result in enumerate(measured.of("passes", setup, SETUPS[setup].ranks)):
            assert set(result["own"]) == set(ranks.passes_of(setup)) and result["grad_enabled"]
            for name, values in result["own"].items():
                measured.check(SETUPS[setup], name, rank, values)

    def test_they_leave_nothing_that_the_next_optimiser_steps_see(
        self, measured: Measured, setup: str
    ) -> None:
        """Bit for bit, as the same kernels run in the same order, dropout and all; so is what an adapter is merged to."""
        results = measured.of("passes", setup, SETUPS[setup].ranks)
        for result in results:
            alone = result["alone"]
            later = result["after passes"]
            assert alone["norms"] == later["norms"]
            assert all(norm is None or norm > 0 for norm in alone["norms"])
            assert all(map(torch.equal, alone["final"], later["final"]))
            assert len(result["merged"]) == 2 * bool(SETUPS[setup].adapter)
            for fresh, merged in zip(result["merged"][:1], result["merged"][1:], strict=True):
                assert fresh.keys() == merged.keys() and all(
                    torch.equal(fresh[name], merged[name]) for name in fresh
                )
        assert any(norm for result in results for norm in result["alone"]["norms"])


@pytest.mark.nightly
@pytest.mark.parametrize("setup", FAMILIES)
def test_every_architectures_passes_give_the_plain_models_scores_or_are_refused(
    measured: Measured, setup: str
) -> None:
    """Refused where packed responses see each other."""
    ((holds, values),) = measured.of("family", setup, 1)
    assert holds == bool(values) == (setup not in ("qwen3_5_text, packed", "gpt_oss, packed"))
    for name, of_pass in values.items():
        measured.check(FAMILIES[setup], name, 0, of_pass)


def test_whole_blocks_are_as_few_as_in_training(measured: Measured) -> None:
    for result in measured.of("held", "fsdp2"):
        limit = max(result["training"])
        assert limit < 4  # training does not hold the whole model
        assert all(0 < max(held) <= limit and held[-1] == 0 for held in result.values())


@pytest.mark.parametrize("strategy", ranks.PLAIN)
def test_a_later_update_of_a_step_weighs_by_the_steps_first_policy(
    measured: Measured, strategy: str
) -> None:
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
    assert {
        name: OWN[name][0].row_cost(ranks.pass_rows(name, 0, 1)[1][0]) for name in costs
    } == costs
