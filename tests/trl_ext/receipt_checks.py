"""What tokens receive in TRL's updates; run by test_trl.py with TRL on the path."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from trl import GRPOConfig, GRPOTrainer

from grail_advantage.dump import read_dump
from grail_advantage.receipt import Finding, check
from grail_advantage.trl_ext import dump as dump_module
from grail_advantage.trl_ext.dump import loss_of
from grail_advantage.view.receipt import main
from tests.core.receipt_loop import TOKENS, MicroBatch, names, rollout, train
from tests.core.tiny_models import tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SEEDS = 10


def trl_value(micro: MicroBatch, args: GRPOConfig, ranks: int, tokens: int, weighted: bool) -> torch.Tensor:
    """TRL's own ``_compute_loss``, whose model gives the micro-batch's log-probabilities."""
    accelerator = SimpleNamespace(
        num_processes=ranks,
        is_main_process=True,
        sync_gradients=True,
        gather=lambda values: values,
        gather_for_metrics=lambda values: values,
        reduce=lambda values, reduction: values,
        distributed_type=DistributedType.NO,
    )
    stand_in = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        beta=args.beta,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        max_completion_length=args.max_completion_length,
        current_gradient_accumulation_steps=micro.count,
        use_vllm=weighted,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": Lists()},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (micro.log_probs, torch.zeros_like(micro.log_probs), None),
    )
    ids = torch.zeros(micro.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": micro.mask.long(),
        "advantages": micro.advantages,
        "old_per_token_logps": micro.old,
        "ref_per_token_logps": micro.ref,
        "importance_sampling_ratio": torch.where(micro.mask, micro.weights, 1.0),
        "num_items_in_batch": torch.tensor(tokens),
    }
    if not weighted:
        del inputs["importance_sampling_ratio"]
    return GRPOTrainer._compute_loss(stand_in, None, inputs)


class Lists(dict):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_no_false_alarm(tmp_path: Path, loss_type: str, level: str) -> None:
    seen, clipped = Counter(), 0.0
    for seed in range(SEEDS):
        draw = np.random.default_rng([seed, len(loss_type)])
        choice = {
            "ranks": int(draw.integers(1, 3)),
            "updates": int(draw.integers(1, 3)),
            "epochs": int(draw.choice([1, 1, 4])),
            "beta": float(draw.choice([0.0, 0.1])),
            "weighted": bool(draw.integers(2)),
            "delta": None if draw.integers(2) else 1.5,
            "corrected": bool(draw.integers(2)),
        }
        given = rollout(
            seed,
            ranks=choice["ranks"],
            updates=choice["updates"],
            epochs=choice["epochs"],
            token_advantages=bool(draw.integers(2)),
            weights=choice["weighted"],
            even=True,
        )
        args = GRPOConfig(
            output_dir=str(tmp_path),
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon=0.15,
            epsilon_high=3.0 if loss_type == "cispo" and seed % 2 else 1.2 if loss_type == "cispo" else 0.3,
            delta=choice["delta"],
            beta=choice["beta"],
            use_bias_correction_kl=choice["corrected"],
            max_completion_length=TOKENS + 3,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        per_update = max(sum(rank == 0 for rank, _ in step) for step in given.plan)
        args.steps_per_generation = per_update * choice["updates"]
        tokens = int(given.batch.mask_BT.sum())
        pieces = train(given, lambda m, args=args, c=choice, n=tokens: trl_value(m, args, c["ranks"], n, c["weighted"]))
        loss = loss_of(args)
        assert loss.account is not None
        batch = given.batch if choice["beta"] else replace(given.batch, ref_log_probs_BT=None)
        receipt = check(batch, loss, pieces)
        assert receipt.ok, (seed, choice, *map(str, receipt.findings))
        both = ~receipt.received_UBT.isnan()
        torch.testing.assert_close(receipt.received_UBT[both], receipt.expected_UBT[both], rtol=1e-3, atol=1e-4)
        clipped += float(receipt.clipped_BT.nansum())
        seen.update(choice.items())
    assert len(seen) == 14, seen
    assert bool(clipped) == (loss_type not in ("sapo", "vespo"))


SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}


def parameters(trainer: GRPOTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def trained(
    folder: Path, dump: dict[str, Any], trainer_class: type = scripted.ScriptedTokenWeights, **options: Any
) -> Any:
    weights = {"token_weights": "grail", "token_dump": {"folder": folder / "tokens", "responses": None, **dump}}
    skip = {"skip_zero_advantage": True} if options.pop("skip", False) else {}
    trainer = build(
        folder, trainer_class, weights={**weights, **skip}, max_steps=8, num_iterations=2, **SIZES, **options
    )
    trainer.train()
    return trainer


def findings_of(folder: Path) -> list[Finding]:
    """Of all files of a run."""
    headers = read_dump(folder / "tokens").receipts()
    return [Finding.from_dict(dict(each)) for header in headers for each in header["findings"]]


def places(folder: Path) -> list[tuple[int, int]]:
    """Step and update of each receipt in a dump."""
    return [(header["step"], header["update"]) for header in read_dump(folder).receipts()]


@pytest.mark.parametrize(("loss_type", "skip"), [("dapo", False), ("bnpo", True), ("sapo", False)])
def test_a_run_received_what_it_intended(tmp_path: Path, loss_type: str, skip: bool) -> None:
    """And trains the same bit for bit as without; a run of 8 updates, 4 for each of two generation batches."""
    options = {"loss_type": loss_type, "skip": skip, "learning_rate": 0.3}
    on, off = trained(tmp_path / "on", {}, **options), trained(tmp_path / "off", {"received": False}, **options)
    assert torch.equal(parameters(on), parameters(off))
    assert not torch.allclose(parameters(on), torch.cat([p.detach().flatten() for p in tiny_model().parameters()]))
    assert not places(tmp_path / "off" / "tokens")
    assert places(tmp_path / "on" / "tokens") == [(1, 0), (5, 0)]
    assert names(findings_of(tmp_path / "on")) == []
    rows = list(read_dump(tmp_path / "on" / "tokens"))
    assert len(rows) == 16
    for row in rows:
        assert row.received_T is not None and len(row.updates) == 2  # of four, by two iterations
        first_T = row.by_update_KT[0]
        if row.updates[0] == 0 and loss_type != "sapo":
            np.testing.assert_allclose(first_T, row.advantage_T, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(row.received_T, row.by_update_KT.mean(axis=0), rtol=1e-5, atol=1e-7)
    later = np.concatenate([row.by_update_KT[1] - row.advantage_T for row in rows])
    assert np.abs(later).max() > 1e-3  # ratios move
    assert main([str(tmp_path / "on" / "tokens")]) == 0


class Truncating(scripted.ScriptedTokenWeights):
    """huggingface/trl#6369: a response whose tokens are masked stays in the denominator."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return super()._compute_loss(model, {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] + 24})


class Shuffling(scripted.ScriptedTokenWeights):
    """verl-project/verl#7956: the advantages are other responses'."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"].flip(0)})


class Cutting(scripted.ScriptedTokenWeights):
    """The last token of each response is masked in the loss."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask_BT = inputs["completion_mask"].clone()
        last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
        return super()._compute_loss(model, {**inputs, "completion_mask": mask_BT.scatter(1, last_B1, 0)})


@pytest.mark.parametrize(("trainer_class", "name"), [(Truncating, "scaled"), (Shuffling, "swapped"), (Cutting, "lost")])
def test_a_fault_in_the_trainer_is_named(tmp_path: Path, trainer_class: type, name: str) -> None:
    trained(tmp_path, {}, trainer_class, loss_type="dapo")
    first = [header["findings"][0]["name"] for header in read_dump(tmp_path / "tokens").receipts()]
    assert len(first) == 2 and set(first) <= {name, "stale"}, first  # a masked token also leaves the attention
    assert names(findings_of(tmp_path)).count(name) == 2
    assert main([str(tmp_path / "tokens")]) == 1


def test_updates_over_several_generations_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    weights = {"token_weights": "uniform", "token_dump": tmp_path / "tokens"}
    build(tmp_path, weights=weights, max_steps=1, **sizes).train()
    assert "make steps_per_generation a multiple of gradient_accumulation_steps" in capsys.readouterr().out
    assert not places(tmp_path / "tokens")


def test_nothing_is_written_where_a_process_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process whose part is missing, as :func:`gather_object` would give it."""
    for name, others in (("whole", []), ("failed", [None])):
        monkeypatch.setattr(
            dump_module, "gather_object", lambda own, others=others: own + others * isinstance(own[0], tuple)
        )
        trainer = trained(tmp_path / name, {})
        assert len(places(tmp_path / name / "tokens")) == (0 if others else 2)
        assert trainer._dump._dump.failed == (2 if others else 0)
    assert len(list(read_dump(tmp_path / "failed" / "tokens"))) == 16


@pytest.mark.parametrize("used", ["loss_mask", "Gradient", "Piece"])
def test_an_error_in_the_receipt_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str) -> None:
    """Of two generation batches the first has no receipt; this process takes part in both gathers."""
    gathered, right, failed = [], getattr(dump_module, used), []

    def gather(own: list[Any]) -> list[Any]:
        gathered.extend(part is None for part in own if part is None or isinstance(part, tuple))
        return own

    def fails_once(*given: Any) -> Any:
        if not failed:
            failed.append(used)
            raise RuntimeError("broken")
        return right(*given)

    monkeypatch.setattr(dump_module, "gather_object", gather)
    monkeypatch.setattr(dump_module, used, fails_once)
    trainer = trained(tmp_path, {})
    assert gathered == [True, False]
    assert trainer._dump._dump.failed == 1
    assert places(tmp_path / "tokens") == [(5, 0)]
    assert names(findings_of(tmp_path)) == []
    assert len(list(read_dump(tmp_path / "tokens"))) == 16


def test_a_training_that_broke_off_has_written_what_it_had_and_starts_anew(tmp_path: Path) -> None:
    class Broken(scripted.ScriptedTokenWeights):
        broken = 2

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            self.broken -= 1
            if not self.broken:
                raise KeyboardInterrupt
            return loss

    weights = {"token_weights": "uniform", "token_dump": tmp_path / "tokens"}
    trainer = build(tmp_path, Broken, weights=weights, max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert places(tmp_path / "tokens") == [(1, 0)]
    assert [row.step for row in read_dump(tmp_path / "tokens")] == [1] * 8 + [2] * 8
    trainer.args.max_steps, trainer._step = 1, 0
    trainer.train()
    assert places(tmp_path / "tokens") == [(1, 0)]
    assert [row.update for row in read_dump(tmp_path / "tokens")] == [0] * 8
    assert names(findings_of(tmp_path)) == []
