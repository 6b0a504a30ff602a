"""What tokens receive in TRL's updates; run by test_trl.py with TRL on the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage.dump import read_dump
from grail_advantage.receipt import Batch, check, trl_loss, watch
from grail_advantage.trl_ext import dump as dump_module
from grail_advantage.trl_ext.rules import LOSSES
from grail_advantage.view.receipt import main
from tests.core.tiny_models import tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import MICRO, Stock, build, parameters


class WatchedStock(Stock):
    """TRL's own trainer, whose updates a watch reads."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "watch"):
            self.watch, self.given = watch(), inputs
        loss = super()._compute_loss(model, inputs)
        self.watch.step()
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if result[0].requires_grad:
            self.watch.read(result[0], range(len(result[0])))
        return result


@pytest.mark.parametrize(("level", "delta"), [("token", 1.1), ("sequence", 1.5)])
@pytest.mark.parametrize("loss_type", (*LOSSES, "luspo", "vespo"))
def test_the_formulas_are_those_of_trls_losses(tmp_path: Path, loss_type: str, level: str, delta: float) -> None:
    """Also of those with which token weights are refused; a batch that is used three times, until tokens are clipped."""
    options = {"loss_type": loss_type, "importance_sampling_level": level, "delta": delta}
    options["epsilon_high"] = 1.2 if loss_type == "cispo" else 0.3
    trainer = build(tmp_path, WatchedStock, num_iterations=3, max_steps=3, learning_rate=1.0, **options)
    trainer.train()
    given = trainer.given
    advantages_BT = given["advantages"][:, None].expand(given["completion_ids"].shape)
    batch = Batch(advantages_BT, given["completion_mask"].bool(), given["old_per_token_logps"], epochs=3)
    loss = trl_loss(**options, max_completion_length=trainer.max_completion_length)
    receipt = check(batch, loss, trainer.watch.pieces)
    assert receipt.ok, list(map(str, receipt.findings))
    torch.testing.assert_close(receipt.received_UBT, receipt.expected_UBT, rtol=1e-3, atol=1e-4, equal_nan=True)
    ratios_differ = receipt.received_UBT[2] - advantages_BT
    assert loss_type == "sapo" or float(ratios_differ[batch.mask_BT].abs().max()) > 1e-2


def trained(folder: Path, trainer_class: type = scripted.ScriptedTokenWeights, **options: Any) -> Any:
    """A run of 8 updates, 4 for each of two generation batches."""
    dump = {"folder": folder / "tokens", "responses": None, "received": options.pop("received", True)}
    weights = {"token_dump": dump, "skip_zero_advantage": options.pop("skip", False)}
    trainer = build(folder, trainer_class, weights=weights, max_steps=8, num_iterations=2, **MICRO, **options)
    trainer.train()
    return trainer


def findings(folder: Path) -> list[list[str]]:
    """Names of mismatches, of each receipt of a run."""
    receipts = read_dump(folder / "tokens").receipts()
    return [[finding["name"] for finding in of["findings"] if finding["mismatch"]] for of in receipts]


@pytest.mark.parametrize(("loss_type", "skip"), [("dapo", False), ("bnpo", True), ("sapo", False), ("grpo", True)])
def test_a_run_received_what_it_intended(tmp_path: Path, loss_type: str, skip: bool) -> None:
    """And trains the same bit for bit as without."""
    options = {"loss_type": loss_type, "skip": skip, "learning_rate": 0.3}
    on, off = trained(tmp_path / "on", **options), trained(tmp_path / "off", received=False, **options)
    assert torch.equal(parameters(on.model), parameters(off.model))
    assert not torch.allclose(parameters(on.model), parameters(tiny_model()))
    assert findings(tmp_path / "off") == [] and findings(tmp_path / "on") == [[], []]
    rows = list(read_dump(tmp_path / "on" / "tokens"))
    assert len(rows) == 16
    for row in rows:
        assert len(row.updates) == 2  # of four, by two iterations
        if row.updates[0] == 0 and loss_type != "sapo":
            np.testing.assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(row.received_T, row.by_update_KT.mean(axis=0), rtol=1e-5, atol=1e-7)
    assert np.abs(np.concatenate([row.by_update_KT[1] - row.advantage_T for row in rows])).max() > 1e-3  # ratios move
    assert main([str(tmp_path / "on" / "tokens")]) == 0


class Cutting(scripted.ScriptedTokenWeights):
    """The last token of each response is masked in the loss."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask_BT = inputs["completion_mask"].clone()
        last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
        return super()._compute_loss(model, {**inputs, "completion_mask": mask_BT.scatter(1, last_B1, 0)})


def test_a_fault_in_the_trainer_is_named(tmp_path: Path) -> None:
    trained(tmp_path, Cutting, loss_type="dapo")
    assert ["lost" in of for of in findings(tmp_path)] == [True, True]
    assert main([str(tmp_path / "tokens")]) == 1


def test_updates_over_several_generations_are_not_read(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    build(tmp_path, weights={"token_dump": tmp_path / "tokens"}, max_steps=1, **sizes).train()
    assert findings(tmp_path) == []


@pytest.mark.parametrize("place", ["check", "loss_mask", "Gradient", "Piece"])
def test_an_error_in_the_receipt_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """As it reads, gathers or compares; the first of two receipts has one, the training is that without."""
    right, failed = getattr(dump_module, place), []

    def fails_once(*given: Any) -> Any:
        if not failed:
            failed.append(given)
            raise RuntimeError("broken")
        return right(*given)

    monkeypatch.setattr(dump_module, place, fails_once)
    found, plain = trained(tmp_path), trained(tmp_path / "plain", received=False)
    assert failed and torch.equal(parameters(found.model), parameters(plain.model))
    receipts = [(of["step"], of["findings"]) for of in read_dump(tmp_path / "tokens").receipts()]
    assert (5, []) in receipts and (place == "Gradient" or len(receipts) == 1)
