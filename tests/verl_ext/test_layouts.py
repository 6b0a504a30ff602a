"""The trainers' advantages under verl's options, through a real TransferQueue: token weight times verl's advantage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import GrailConfig, compute_token_weights
from tests import forked
from tests.core.tiny_models import Rollout, char_tokenizer, make_batch, tiny_model
from tests.verl_ext import layouts_process as process
from tests.verl_ext.layouts_process import GROUPS, SCENARIOS, SEVERAL_OUTPUTS, Output

pytestmark = pytest.mark.slow

Rows = dict[str, dict[str, torch.Tensor]]


class Measured:
    """What the other process measured, and its model."""

    def __init__(self, model: PreTrainedModel, results: dict[tuple[str, str], Any]) -> None:
        self.model = model
        self._results = results

    def of(self, kind: str, name: str = "") -> Any:
        """A result; fails with the traceback of an experiment that raised."""
        result = self._results[kind, name]
        if isinstance(result, str):
            pytest.fail(result)
        return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("layouts")
    model = tiny_model(seed=5)
    model.save_pretrained(folder / "model")
    done = forked.run("tests.verl_ext.layouts_process", str(folder))
    assert (folder / "result.pt").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return Measured(model, torch.load(folder / "result.pt", weights_only=False))


def _scores(model: PreTrainedModel, output: Output) -> tuple[torch.Tensor, Any]:
    """Scores of all response tokens in one process, and the answer span."""
    batch = make_batch([Rollout(output.prompt, output.response, -1.0)])
    plain = compute_token_weights(model, char_tokenizer(), *batch.tensors(), GrailConfig("robust", gate="all"))
    return plain.scores[0, batch.response_mask[0].bool()], plain.spans[0]


def _expected_weights(model: PreTrainedModel, output: Output, mask_T: torch.Tensor, trains: bool) -> np.ndarray:
    """Preset ``robust``, in numpy: statistics over the reasoning tokens that train, content at 5, the mass restored."""
    mask = mask_T.numpy().astype(bool)
    scores_T, span = _scores(model, output)
    if span is None or not trains:
        return mask.astype(float)
    index = np.arange(len(mask))
    reasoning = index < span.start
    logs = np.log(scores_T.double().numpy() + 1e-8)
    known = logs[reasoning & mask]
    z = (logs - known.mean()) / np.sqrt(known.var() + 1e-8) if known.size else np.zeros_like(logs)
    weights = np.where(reasoning, np.clip(1 + 0.5 * z, 0.5, 5.0), 1.0)
    weights[span.content_start : span.content_end] = 5.0
    weights = weights * mask
    return weights * mask.sum() / weights.sum()


def _assert_weighted(model: PreTrainedModel, outputs: list[Output], base: Rows, weighted: Rows) -> int:
    """Advantages are weight times verl's; returns the number of rows whose weights are not all 1."""
    moved = 0
    for output in outputs:
        advantages = base[output.key]["advantages"].double().numpy()
        mask = base[output.key]["response_mask"]
        trains = bool((advantages != 0).any())
        expected = _expected_weights(model, output, mask, trains)
        found = weighted[output.key]["advantages"].double().numpy()
        np.testing.assert_allclose(found, expected * advantages, rtol=2e-4, atol=1e-6, err_msg=output.key)
        torch.testing.assert_close(weighted[output.key]["returns"], weighted[output.key]["advantages"], rtol=0, atol=0)
        moved += trains and not np.allclose(expected, mask.numpy())
    return moved


@pytest.mark.parametrize("name", SCENARIOS)
class TestEveryScenario:
    def test_advantages_are_weight_times_verls_and_nothing_else_differs(self, measured: Measured, name: str) -> None:
        result, outputs = measured.of("scenario", name), SCENARIOS[name].outputs
        verl, weighted = result["verl"], result["weighted"]
        assert _assert_weighted(measured.model, outputs, verl["rows"], weighted["rows"]) >= 3
        for key in (output.key for output in outputs):
            verls, ours = verl["rows"][key], weighted["rows"][key]
            assert set(verls) == set(ours)
            for field in verls.keys() - {"advantages", "returns"}:
                assert torch.equal(verls[field], ours[field]), (key, field)
        assert {metric: weighted["metrics"][metric] for metric in verl["metrics"]} == verl["metrics"]
        # Rows that fill up get no advantage.
        assert len(weighted["padding"]) == -len(outputs) % 5 > 0
        assert all(weighted["rows"][key]["advantages"].tolist() == [0.0] for key in weighted["padding"])
        assert all(np.isfinite(value) for value in weighted["metrics"].values())


class TestOptionsTakeEffect:
    """What the tests above stand on: each option changed something."""

    def _rows(self, measured: Measured, name: str, kind: str = "verl") -> Rows:
        rows = measured.of("scenario", name)[kind]["rows"]
        return {output.key: rows[output.key] for output in SCENARIOS[name].outputs}

    def _rejected(self, measured: Measured, name: str) -> list[torch.Tensor]:
        rows = self._rows(measured, name, "weighted").values()
        return [row["loss_mask"].bool() & ~row["response_mask"].bool() for row in rows]

    def test_kl_in_reward(self, measured: Measured) -> None:
        plain, with_kl = (self._rows(measured, name) for name in ("plain", "KL in reward"))
        for key, row in with_kl.items():
            assert (row["token_level_rewards"] != 0).sum() > 1
            assert not torch.allclose(row["advantages"], plain[key]["advantages"])

    def test_corrections_reject_tokens_sequences_and_with_bypass_nothing(self, measured: Measured) -> None:
        for name in ("decoupled, tokens", "everything"):
            rejected = self._rejected(measured, name)
            assert sum(bool(row.any()) and not row.all() for row in rejected) >= 4
            assert all("rollout_is_weights" in row for row in self._rows(measured, name).values())
        rejected = self._rejected(measured, "decoupled, sequences")
        assert all(row.all() or not row.any() for row in rejected)
        assert 0 < sum(bool(row.all()) for row in rejected) <= len(rejected) - 3
        assert not any(row.any() for row in self._rejected(measured, "bypass"))
        assert all("rollout_is_weights" not in row for row in self._rows(measured, "bypass").values())

    def test_a_session_has_one_advantage_whatever_its_outputs(self, measured: Measured) -> None:
        """Each session counts once in its group, and all its outputs share its advantage before the weights."""
        rows = self._rows(measured, "several outputs")
        assert len(SEVERAL_OUTPUTS) > len(SCENARIOS["plain"].outputs)
        for output in SEVERAL_OUTPUTS:
            advantages = rows[output.key]["advantages"]
            expected = _grpo(output.uid)[output.session]
            assert torch.allclose(advantages, expected.expand_as(advantages), atol=1e-5)


def _grpo(uid: str) -> torch.Tensor:
    """The group's advantages by hand."""
    rewards = torch.tensor([output.reward for output in GROUPS[uid]])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


class TestGroupFiltering:
    @pytest.mark.parametrize("mode", ["sync", "colocate_async"])
    def test_a_group_without_a_difference_is_replaced_and_the_others_are_weighted(
        self, measured: Measured, mode: str
    ) -> None:
        result = measured.of("filtered_groups", mode)
        rows = result["rows"]
        uids = {key.split("_")[0] for key in rows}
        assert len(uids) == 3 and uids <= set("abde") and uids & set("de")
        if mode == "sync":
            assert result["refills"] == [2]
            assert result["metrics"]["training/filter_groups/evicted_samples"] == 1
            assert result["metrics"]["training/filter_groups/discarded_surplus_samples"] == 1
        base: Rows = {}
        outputs = [output for group in GROUPS.values() for output in group if output.key in rows]
        for uid in uids:
            for output, advantage in zip(GROUPS[uid], _grpo(uid), strict=True):
                mask = rows[output.key]["response_mask"]
                base[output.key] = {"advantages": advantage * mask, "response_mask": mask}
        assert _assert_weighted(measured.model, outputs, base, rows) >= 8


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_later_update_of_a_step_weighs_by_the_steps_first_policy(measured: Measured, strategy: str) -> None:
    """``separate_async`` with ``parameter_sync_step`` above 1: the actor has moved, the old log-probabilities have not. Bypass
    takes the policy as it is. The policy is put back, after an error too, and nothing is kept."""

    def advantages(rows: Rows) -> torch.Tensor:
        return torch.cat([rows[output.key]["advantages"] for output in process.TWO_GROUPS])

    result = measured.of("later_update", strategy)
    first = advantages(measured.of("scenario", "separate_async")["weighted"]["rows"])
    assert result["moved"]
    torch.testing.assert_close(advantages(result["decoupled"]["rows"]), first, rtol=2e-4, atol=1e-6)
    assert set(result["bypass"]["calls"]) == {"compute_token_scores"}
    assert not torch.allclose(advantages(result["bypass"]["rows"]), first, rtol=1e-2)
    assert result["decoupled"]["policy_is_back"] and result["bypass"]["policy_is_back"]
    assert result["back after an error"] and result["kept policies"] == [0]
