"""Every pass inside verl's FSDP engine, on two and four ranks, against one process and a plain model; what passes hold
and leave.

The layouts are named in ``ranks.SETUPS``. Sequence parallelism has a reference attention under verl's own wrapper and its
all-to-all, as flash attention has no CPU build; that kernel itself is tested where GPUs are.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import Oar
from grail_advantage.data import RowScores
from grail_advantage.model.hugging_face import HuggingFaceModel
from tests.core.tiny_models import char_tokenizer
from tests.verl_ext import ranks
from tests.verl_ext.ranks import FAMILIES, OWN, SETUPS, Setup, start_ranks

pytestmark = pytest.mark.slow


def check(
    model: PreTrainedModel, setup: Setup, name: str, rank: int, measured: list[RowScores]
):
    """That a pass on a rank gave what the plain model gives, in one process and one response at a time."""
    signal, temperature, _ = OWN[name]
    rows = ranks.pass_rows(name, rank // setup.sequence_parallel, setup.data_parallel)
    cpu = torch.device("cpu")
    plain = HuggingFaceModel(
        model, char_tokenizer(), temperature, cpu, group=None, step=0, tokens=1
    )
    expected = signal.run(rows, plain)
    # The gradient of a divergence as small as OAR-G's keeps three to four digits of float32's seven; so does a sum that
    # cancels.
    rtol = 1e-4
    if isinstance(signal, Oar):
        rtol = {"gradient": 5e-3, "perturbation": 5e-4}[signal.method]
    for actual, row_scores in zip(measured, expected, strict=True):
        assert (actual.norms is None) == (row_scores.norms is None)
        for name, expected_T in vars(row_scores).items():
            if expected_T is None:
                continue
            actual_T = getattr(actual, name)
            count = len(expected_T)
            atol = rtol * float(expected_T.nan_to_num().abs().max()) if count else 0.0
            close = {"rtol": rtol, "atol": atol, "equal_nan": True}
            torch.testing.assert_close(actual_T[:count], expected_T.float(), **close)
            # The last token predicts nothing.
            assert not actual_T[count:].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("passes")


@pytest.fixture(scope="module")
def models(folder):
    """The plain models, which the ranks load."""
    return ranks.write_models(folder)


@pytest.fixture(scope="module")
def measured(folder: Path, models: dict[str, PreTrainedModel]):
    """What so many ranks measured, each; they start when they are asked for first."""
    return cache(lambda size: start_ranks(str(size), folder, size))


@pytest.mark.parametrize("name", SETUPS)
class TestEverySetup:
    def test_passes_give_the_plain_models_scores(self, measured, models, name):
        setup = SETUPS[name]
        for rank, result in enumerate(measured(setup.ranks)):
            later = result["passes"][name]["after passes"]
            assert list(later["own"]) == ranks.passes_of(name) and later["enabled"]
            for pass_name, values in later["own"].items():
                check(models[setup.adapter or setup.model], setup, pass_name, rank, values)

    def test_they_leave_nothing_that_the_next_optimiser_steps_see(self, measured, name):
        """Bit for bit, as the same kernels run in the same order, dropout and all; so is what an adapter is merged to."""
        results = [result["passes"][name] for result in measured(SETUPS[name].ranks)]
        for result in results:
            alone = result["alone"]
            later = result["after passes"]
            # An optimiser step before the passes is the same, and so is one after a pass in between.
            assert alone["norms"] == later["norms"]
            assert all(norm is None or norm > 0 for norm in alone["norms"])
            assert all(map(torch.equal, alone["final"], later["final"]))
            assert bool(alone["merged"]) == bool(SETUPS[name].adapter)
            torch.testing.assert_close(alone["merged"], later["merged"], rtol=0, atol=0)
        # verl gives the norm out on one rank of a sequence-parallel group.
        assert any(norm for result in results for norm in result["alone"]["norms"])


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """The models of all architectures, and what a rank measured of them."""
    folder = tmp_path_factory.mktemp("families")
    models = {name: family.build().eval() for name, family in ranks.ARCHITECTURES.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return models, start_ranks("families", folder, 1)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_every_architectures_passes_give_the_plain_models_scores_or_are_refused(
    families, name
):
    """Refused where packed responses see each other."""
    models, results = families
    setup = FAMILIES[name]
    holds, passes = results["family"][name]
    assert (
        holds == bool(passes) == (name not in ("qwen3_5_text, packed", "gpt_oss, packed"))
    )
    for pass_name, values in passes.items():
        check(models[setup.model], setup, pass_name, 0, values)


def test_whole_blocks_are_as_few_as_in_training(measured):
    for result in [result["held"]["fsdp2"] for result in measured(2)]:
        limit = max(result["training"])
        # Training does not hold the whole model, which has four blocks.
        assert limit < 4
        assert all(0 < max(held) <= limit and held[-1] == 0 for held in result.values())


@pytest.mark.parametrize("strategy", ranks.PLAIN)
def test_a_later_update_of_a_step_weighs_by_the_steps_first_policy(measured, strategy):
    """``separate_async`` with ``parameter_sync_step`` above 1: the actor has moved, the old log-probabilities have not. Bypass
    takes the policy as it is. The policy is put back, after an error too, and nothing is kept."""
    for result in [result["later_update"][strategy] for result in measured(2)]:
        first = result["first"]
        torch.testing.assert_close(result["decoupled"], first, rtol=2e-4, atol=1e-6)
        assert not torch.allclose(result["bypass"], first, rtol=1e-2)
        # After the update, after a step in bypass mode, and after one whose pass failed.
        moved, *policies = result["policies"]
        assert all(all(map(torch.equal, moved, policy)) for policy in policies)
        assert result["kept"] == [0]


def test_cost_of_a_row_for_sharing_out():
    # "text after the box": 15 prompt tokens, 19 reasoning tokens, 9 of the box, 17 after it
    costs = {
        "oar_g": 43,
        "oar_g, port, last": 60,
        "oar_p": 43 * 19,
        "oar_p, few, joint": 43 * 7,
    }
    for name, cost in costs.items():
        assert OWN[name][0].row_cost(ranks.pass_rows(name, 0, 1)[0]) == cost
