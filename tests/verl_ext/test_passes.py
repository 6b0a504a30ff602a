"""Every pass inside verl's FSDP engine, on two and four ranks, against one process and a plain model.

The layouts are named in ``pass_plan.SETUPS``. Sequence parallelism has a reference attention under verl's own wrapper and its
all-to-all, as flash attention has no CPU build; that kernel itself is tested where GPUs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grail_advantage import Oar
from grail_advantage.methods.saliency import Saliency
from tests.verl_ext import pass_plan as plan
from tests.verl_ext.pass_plan import BATCH, OWN, SETUPS, SHARED, TARGETS, passes_of, shared_of
from tests.verl_ext.plain_model import RTOL, Plain, close
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks

pytestmark = pytest.mark.slow

CLEAN = {"whole": [], "held": [], "gradients": [], "hooks": [], "training": [], "mode": None, "grad_enabled": True}

WITHOUT_CHUNKS = ("fsdp, lora on the head", "fsdp, lora beside whole embeddings and head")


def tolerance(signal: Any) -> float:
    """The gradient of a divergence as small as OAR-G's keeps three to four digits of float32's seven; so does a sum that
    cancels."""
    if not isinstance(signal, Oar):
        return RTOL
    return 5e-3 if signal.method == "gradient" else 5e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("passes")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain(plan.write_models(folder))


@pytest.fixture(scope="module")
def measured(folder: Path, plain: Plain) -> Iterator[Any]:
    """What all ranks of a set-up measured; starts the ranks of its number when they are asked for first."""
    known: dict[int, list[Results]] = {}

    def of(setup: str) -> list[dict[str, Any]]:
        size = SETUPS[setup].ranks
        if size not in known:
            place = folder / f"of {size}"
            place.mkdir()
            for model in folder.iterdir():
                (place / model.name).symlink_to(model)
            known[size] = start_ranks("tests.verl_ext.pass_ranks", place, size)
        return of_all_ranks(known[size], "passes", setup)

    return of


def _model(setup: str) -> str:
    return SETUPS[setup].adapter or SETUPS[setup].model


def _check_own(plain: Plain, setup: str, name: str, rank: int, found: dict[str, list[torch.Tensor]]) -> None:
    how, signal = SETUPS[setup], OWN[name][0]
    rank //= how.sequence_parallel
    rollouts, rows = plan.pass_rows(name, rank, how.data_parallel)
    assert ("gradient_norm" in found) == (name in plan.SALIENCY or name in plan.GRADIENT)
    for at, (rollout, scores_T) in enumerate(zip(rollouts, found["scores"], strict=True)):
        assert scores_T.dtype == torch.float32
        if name in plan.INFERENCE:
            close(scores_T, plain.inference(_model(setup), name, rank % 2)[at])
            continue
        expected_T = plain.scores(_model(setup), name)[rollout]
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


def _check_shared(plain: Plain, setup: str, key: tuple[str, str], rank: int, found: dict[str, Any]) -> None:
    """Log-probabilities and entropies are verl's and the plain model's, saliencies the plain model's."""
    (how, share), setting = key, SETUPS[setup]
    leaf, temperature, _ = SHARED[how]
    if rank % setting.sequence_parallel != 0:  # verl collects from the first rank of each group
        assert found["fused"] == found["verl"] == {}
        return
    rows = list(range(len(BATCH)))[rank // setting.sequence_parallel :: setting.data_parallel]
    assert set(found["verl"]) == {"log_probs", "entropy"}
    for at, row in enumerate(rows):
        expected_S, log_probs_S = plain.shared(_model(setup), row, leaf, temperature)
        # The last position predicts whatever response verl put next to this one; nobody reads it.
        torch.testing.assert_close(found["fused"]["log_probs"][at][:-1], log_probs_S, rtol=RTOL, atol=RTOL)
        for column in ("log_probs", "entropy"):
            of_both = [found[kind][column][at][:-1] for kind in ("fused", "verl")]
            torch.testing.assert_close(*of_both, rtol=RTOL, atol=RTOL)
        saliency_S, norm_S = (found["fused"][name][at] for name in ("saliency", "gradient_norm"))
        if row in TARGETS[share]:
            close(saliency_S, expected_S)
            _, _, (_, end) = plan.shared_row(BATCH[row])
            assert (saliency_S[end:] == 0).all() and (norm_S[: end - 1] > 0).all()
        else:
            assert saliency_S.isnan().all() and norm_S.isnan().all() and len(norm_S) == len(expected_S)
    seconds = [float(of_row) for of_row in found["fused"]["saliency_seconds"]]
    assert [value > 0 for value in seconds] == [row in TARGETS[share] for row in rows]  # NaN is not
    assert len({value for value in seconds if value == value}) <= 1


def _check_clean(name: str, left: dict[str, Any]) -> None:
    """After passes without a backward FSDP frees at the next forward what it holds; nothing else may stay."""
    left = dict(left)
    if name not in plan.SALIENCY and name not in plan.GRADIENT:
        left["whole"] = []
        left["held"] = []
    assert left == CLEAN


@pytest.mark.parametrize("setup", SETUPS)
class TestEverySetup:
    def test_own_passes_give_the_plain_models_scores_and_leave_nothing_behind(
        self, measured: Any, plain: Plain, setup: str
    ) -> None:
        for rank, result in enumerate(measured(setup)):
            assert set(result["own"]) == set(passes_of(setup))
            for name, found in result["own"].items():
                _check_clean(name, found.pop("leftovers"))
                _check_own(plain, setup, name, rank, found)

    def test_shared_forwards_give_verls_log_probs_and_the_plain_models_saliency(
        self, measured: Any, plain: Plain, setup: str
    ) -> None:
        for rank, result in enumerate(measured(setup)):
            assert set(result["shared"]) == set(shared_of(setup))
            for key, found in result["shared"].items():
                _check_clean("", found["leftovers"])
                _check_shared(plain, setup, key, rank, found)

    def test_logits_in_chunks_give_the_same(self, measured: Any, plain: Plain, setup: str) -> None:
        """Where ranks may take different numbers of them: each call of a head with a LoRA gathers parameters with FSDP1."""
        whole = SETUPS[setup].kernels or setup in WITHOUT_CHUNKS
        sizes = []
        for rank, result in enumerate(measured(setup)):
            found = result["chunked"]
            _check_own(plain, setup, "saliency, robust", rank, found["own"])
            _check_shared(plain, setup, ("rows", "uneven"), rank, found["shared"])
            sizes += found["sizes"]
        assert (sizes == []) if whole else (max(sizes) == plan.CHUNK and len(sizes) > 4)

    def test_the_next_optimiser_steps_are_the_same(self, measured: Any, setup: str) -> None:
        """Bit for bit, as the same kernels run in the same order, dropout and all."""
        for result in measured(setup):
            alone, after = result["alone"], result["after passes"]
            assert alone["norms"] == after["norms"]
            assert all(norm is None or norm > 0 for norm in alone["norms"])
            assert all(map(torch.equal, alone["final"], after["final"]))
        assert any(norm for result in measured(setup) for norm in result["alone"]["norms"])


@pytest.mark.parametrize("setup", ["fsdp, parameters offloaded", "fsdp2, packed"])
def test_one_row_a_micro_batch_gives_verls_log_probs_bit_by_bit(measured: Any, setup: str) -> None:
    """The same kernels then run on the same shapes."""
    for result in measured(setup):
        found = result["shared"]["one response each", "uneven"]
        for name in ("log_probs", "entropy"):
            assert all(map(torch.equal, found["fused"][name], found["verl"][name]))


@pytest.mark.parametrize("setup", [name for name, how in SETUPS.items() if how.adapter])
def test_merged_weights_for_the_rollout_are_the_same(measured: Any, setup: str) -> None:
    """From a fresh engine and from one after passes; of ``actor_rollout_ref.model.lora.merge``."""
    for result in measured(setup):
        fresh, after = result["merged"]
        assert fresh.keys() == after.keys() and all(torch.equal(fresh[name], after[name]) for name in fresh)
