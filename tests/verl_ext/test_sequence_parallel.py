"""Saliency under Ulysses sequence parallelism, and on four ranks, against a plain model in one process.

verl's Ulysses patch needs flash attention, which has no CPU build. Here a reference attention stands behind verl's own wrapper
and its all-to-all, so packing, slices and the exchange are verl's; the kernel itself is tested where GPUs are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.verl_ext import sequence_parallel_ranks as ranks
from tests.verl_ext import test_shared_forward
from tests.verl_ext.rank_group import of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, write_models

pytestmark = pytest.mark.slow

ROWS = [test_shared_forward._row(rollout) for rollout in test_shared_forward.BATCH]
CHOSEN = {0, 2, 3, 4, 8}
"""Rows of the batch with a target in the fused pass; with four data-parallel ranks one of these has none."""
RTOL = 1e-4
LEAF_BLOCK = {"embeddings": 0, "middle": 2}


def share_rows(data_parallel: int) -> list[list[int]]:
    return [list(range(rank, len(ROWS), data_parallel)) for rank in range(data_parallel)]


def deal_rows() -> dict[int, list[list[tuple]]]:
    """Each data-parallel rank's rows, by the number of these ranks."""
    return {size: [[(*ROWS[row], row in CHOSEN) for row in share] for share in share_rows(size)] for size in (1, 2, 4)}


class Measured:
    """The plain models, and what all ranks measured, by number of ranks."""

    def __init__(self, models: dict[str, PreTrainedModel], results: dict[int, list[dict]]) -> None:
        self.models = models
        self.results = results
        self.plain = cache(self._plain)

    def of(self, kind: str, name: str, world_size: int) -> list[Any]:
        return of_all_ranks(self.results[world_size], kind, name)

    def _plain(self, model: str, row: int, leaf: str, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``|| g * h ||`` by autograd's own gradient of a hidden state, and the log-probability of every next token."""
        tokens, _, (start, end) = ROWS[row]
        # An adapted model is frozen, which would leave its hidden states without gradients.
        output = self.models[model].requires_grad_(True)(tokens.unsqueeze(0), output_hidden_states=True)
        log_probs_S = torch.log_softmax(output.logits[0] / temperature, dim=-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        hidden = output.hidden_states[LEAF_BLOCK[leaf]]
        (gradient,) = torch.autograd.grad(-log_probs_S[start - 1 : end - 1].sum(), hidden)
        return (gradient * hidden)[0].norm(dim=-1).detach(), log_probs_S.detach()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the ranks, first two and then four, and waits for all their experiments."""
    results, models = {}, {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp(f"sequence{world_size}")
        models = write_models(folder)
        torch.save(deal_rows(), folder / "plan.pt")
        results[world_size] = start_ranks("tests.verl_ext.sequence_parallel_ranks", folder, world_size)
    return Measured(models, results)


def test_some_slices_hold_no_target() -> None:
    """What the next test stands on: with one long row in slices, the answer lies in one slice or two of them."""
    tokens, _, (start, end) = max(ROWS, key=lambda row: len(row[0]))
    for size in (2, 4):
        width = -(-len(tokens) // size)
        assert len({(position - 1) // width for position in range(start, end)}) < size


@pytest.mark.parametrize("how", ranks.HOWS)
@pytest.mark.parametrize("name", ranks.LAYOUTS)
class TestPasses:
    def test_separate_pass_gives_the_plain_models_saliency_on_every_rank(
        self, measured: Measured, name: str, how: str
    ) -> None:
        layout, settings = ranks.LAYOUTS[name], ranks.HOWS[how]
        shares = share_rows(layout.ranks // layout.sequence_parallel)
        for rank, result in enumerate(measured.of("layouts", name, layout.ranks)):
            found = result["passes"][how]["separate"]["saliency"]
            for row, saliency_P in zip(shares[rank // layout.sequence_parallel], found, strict=True):
                _, response_start, (_, end) = ROWS[row]
                expected_S, _ = measured.plain(layout.model, row, settings.leaf, settings.temperature)
                torch.testing.assert_close(
                    saliency_P, expected_S[response_start - 1 : end], rtol=RTOL, atol=RTOL * float(expected_S.max())
                )
            assert {**result["passes"][how]["leftovers"], "held": []} == {**CLEAN, "held": []}

    def test_shared_forward_gives_the_same_saliency_and_verls_log_probs(
        self, measured: Measured, name: str, how: str
    ) -> None:
        layout, settings = ranks.LAYOUTS[name], ranks.HOWS[how]
        shares = share_rows(layout.ranks // layout.sequence_parallel)
        for rank, result in enumerate(measured.of("layouts", name, layout.ranks)):
            found = result["passes"][how]
            if rank % layout.sequence_parallel != 0:
                # verl collects from the first rank of each sequence-parallel group.
                assert found["fused"] == found["verl"] == {}
                continue
            for at, row in enumerate(shares[rank // layout.sequence_parallel]):
                expected_S, log_probs_S = measured.plain(layout.model, row, settings.leaf, settings.temperature)
                saliency_S = found["fused"]["saliency"][at]
                if row in CHOSEN:
                    torch.testing.assert_close(saliency_S, expected_S, rtol=RTOL, atol=RTOL * float(expected_S.max()))
                else:
                    assert saliency_S.isnan().all()
                torch.testing.assert_close(found["fused"]["log_probs"][at][:-1], log_probs_S, rtol=RTOL, atol=RTOL)
                for field in ("log_probs", "entropy"):
                    torch.testing.assert_close(
                        found["fused"][field][at][:-1], found["verl"][field][at][:-1], rtol=RTOL, atol=RTOL
                    )


@pytest.mark.parametrize("name", ranks.LAYOUTS)
def test_the_next_optimiser_step_is_the_same(measured: Measured, name: str) -> None:
    for result in measured.of("layouts", name, ranks.LAYOUTS[name].ranks):
        assert result["after"]["norm"] == result["alone"]["norm"] != 0
        assert all(map(torch.equal, result["after"]["final"], result["alone"]["final"]))
