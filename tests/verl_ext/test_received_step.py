"""From the trainer's step to the file of what tokens received, without Ray or a model: verl's loss on log-probabilities that
are made up, in workers that watch it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from grail_advantage import Method, Rollouts
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.method import build
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.received import UpdateReader
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT, trains
from tests.verl_ext.one_step import Workers
from tests.verl_ext.test_one_step import ROWS
from tests.verl_ext.test_step_dump import Dumping

ON = ("algorithm.token_dump.responses=null", "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


class Alternating(Method):
    """Token advantages of both signs in a response."""

    names: ClassVar = {"alternating": {}}
    gives = "advantages"

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        signs_T = 1.0 - 2.0 * (torch.arange(r.mask.shape[1]) % 2)
        return r.advantages.unsqueeze(1) * signs_T


class Updating(Workers):
    """Workers of one rank whose update is verl's loss, in micro-batches of two, on log-probabilities without a model."""

    moved = 0.0
    """How far the policy is from the old one."""
    fault: Any = None

    def __init__(self, store: Any, config: Any) -> None:
        super().__init__(store)
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.watch, self.requests = UpdateReader(), []

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        self.requests.append((list(batch.keys), batch.fields, dict(batch.extra_info)))
        worker: Any = SimpleNamespace(engine=None, loss_fn=lambda **given: ppo_loss(self.config, **given))
        data = self._data(batch)
        if WATCHED not in batch.extra_info:
            self._steps(worker, data)
        else:
            for _ in range(batch.extra_info["epochs"]):
                places = [int(self.store.rows[key][PLACES][0]) for key in batch.keys]
                with self.watch.optimiser_step(worker, data, places):
                    self._steps(worker, data)
        return {"metrics": {"mfu": [0.0]}}

    def _data(self, batch: KVBatchMeta) -> Any:
        names = ["prompts", "responses", "response_mask", "old_log_probs", "advantages", PLACES]
        data = self.store.kv_batch_get(batch.keys, "train", names)
        tokens = int(sum(self.store.rows[key]["loss_mask"].sum() for key in batch.keys))
        if LEAVE_OUT in batch.extra_info:
            trained = trains(data["advantages"].unbind(), data["response_mask"].unbind())
            data = tu.index_select_tensor_dict(data, [row for row, is_trained in enumerate(trained) if is_trained])
        tu.assign_non_tensor(data, **batch.extra_info, dp_size=1, batch_num_tokens=tokens)
        return data

    def _steps(self, worker: Any, data: Any) -> None:
        for start in range(0, len(data), 2):
            micro = tu.index_select_tensor_dict(data, list(range(start, min(len(data), start + 2))))
            old = [values + self.moved for values in micro["old_log_probs"].unbind()]
            prompts = micro["prompts"].offsets().diff().tolist()
            whole = [
                torch.cat([torch.zeros(n - 1), values, torch.zeros(1)]) for n, values in zip(prompts, old, strict=True)
            ]
            log_probs = torch.nested.as_nested_tensor(whole, layout=torch.jagged).requires_grad_()
            loss, _ = worker.loss_fn(model_output={"log_probs": log_probs}, data=micro)
            (loss * (self.fault or 1.0)).backward()

    def take_received(self, number: str) -> list[Any]:
        return [self.watch.take(number), None]


def update(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *overrides: str,
    signal: Method | None = None,
    updating: type[Updating] = Updating,
    **workers: Any,
) -> tuple[Dumping, list[DumpRow]]:
    """A step with its update; the responses as they read back."""
    step = Dumping(monkeypatch, folder, *ON, *overrides)
    if signal is not None:
        step.set_signal(signal)
    trainer = step.trainer
    trainer.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 2
    trainer.actor_rollout_wg = step.workers = updating(step.store, trainer.config)
    for name, value in workers.items():
        setattr(step.workers, name, value)
    trainer.distillation_config = None
    step.run()
    keys = [key for key, *_ in ROWS]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys], fields=["responses"])
    written = trainer._update_actor(batch, step.metrics)
    assert written.keys == keys
    assert WATCHED not in written.extra_info and written.fields == ["responses"]
    return step, step.close(folder)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", ["grail", "uniform", "both signs"])
def test_what_arrives_is_what_was_intended(
    name: str, skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On policy, after one update: with every kind of method, also one whose token advantages have both signs."""
    chosen = Alternating() if name == "both signs" else build(name)
    with monkeypatch.context() as patch:
        patch.setattr(TokenWeightTrainer, "_skips", skips)
        step, rows = update(patch, tmp_path, signal=chosen)
    assert not [finding for header in read_dump(tmp_path).receipts() for finding in header["findings"]]
    assert step.metrics["receipt/findings"] == 0 and step.metrics["receipt/clipped"] == 0
    assert step.metrics["token_dump/failed_files"] == 0
    assert len(rows) == len(ROWS)
    left_out = 0
    for row in rows:
        assert row.received_T is not None and row.advantage_T is not None
        trains = bool((row.advantage_T[row.mask_T] != 0).any())
        if skips and not trains:
            left_out += 1
            assert row.updates.tolist() == []
        else:
            assert row.updates.tolist() == [0]
            assert row.received_T == pytest.approx(row.advantage_T, rel=1e-4, abs=1e-6)
    assert left_out == (1 if skips else 0)
    assert [header["loss"] for header in read_dump(tmp_path).receipts()] == ["vanilla"]


def test_the_effect_is_the_change_since_the_old_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one more forward over the batch after the update, in the steps that ask for it; the figures are of it."""

    class Moving(Updating):
        forwards = 0

        def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
            self.forwards += 1
            super().compute_log_prob(batch)
            for place, key in enumerate(batch.keys):
                self.store.rows[key]["log_probs"] = (-0.1 + 0.01 * place * (self.forwards - 1)) * torch.ones(
                    len(self.store.rows[key]["log_probs"])
                )
            return batch

    for every, forwards in ((0, 1), (1, 2)):
        folder = tmp_path / str(every)
        step, rows = update(monkeypatch, folder, f"algorithm.token_dump.effect_every={every}", updating=Moving)
        assert step.workers.forwards == forwards
        for place, row in enumerate(rows):
            if every:
                assert row.effect_T[row.mask_T] == pytest.approx(0.01 * place, abs=1e-6)
        assert every or all(row.effect_T is None for row in rows)
        assert ("grail/moved_with_advantage_rate" in step.metrics) == bool(every)


def test_ratios_and_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy has moved by a ratio of 1.5 in both epochs: where the advantage is positive the loss clips."""
    overrides = ("actor_rollout_ref.actor.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=True")
    step, rows = update(monkeypatch, tmp_path, *overrides, moved=float(torch.tensor(1.5).log()))
    assert step.metrics["receipt/findings"] == 0 and 0 < step.metrics["receipt/clipped"] < 1
    for row in rows:
        assert row.received_T is not None and row.advantage_T is not None and row.updates.tolist() == [0, 1]
        for t, advantage in enumerate(row.advantage_T.tolist()):
            wanted = 0.0 if advantage > 0 else 1.5 * advantage
            assert row.by_update_KT[:, t].tolist() == pytest.approx([wanted] * 2, rel=1e-4)
            assert row.clipped_T[t] == (advantage > 0)


@pytest.mark.parametrize(("workers", "name"), [({"fault": 0.25}, "scaled"), ({"moved": 0.1}, "stale")])
def test_a_fault_is_found(
    workers: dict[str, float], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is a quarter of what it should be, and first ratios that are not 1."""
    step, _ = update(monkeypatch, tmp_path, **workers)
    (header,) = read_dump(tmp_path).receipts()
    (finding,) = header["findings"]
    assert finding["name"] == name and step.metrics["receipt/findings"] == 1
    assert finding["examples"][0][0] in {key for key, *_ in ROWS}


def test_switched_off_nothing_is_asked_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, rows = update(monkeypatch, tmp_path, "algorithm.token_dump.received=false")
    ((_, fields, settings),) = step.workers.requests
    assert (
        fields == ["responses"]
        and WATCHED not in settings
        and all(PLACES not in row for row in step.store.rows.values())
    )
    assert [row.received_T for row in rows] == [None] * len(ROWS) and not list(tmp_path.glob("received_*"))
    assert not any(name.startswith("receipt/") for name in step.metrics)


def test_an_error_costs_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: str) -> list[Any]:
        return [ZeroDivisionError("in a worker")]

    step, rows = update(monkeypatch, tmp_path, take_received=fail)
    assert step.trainer._dump.steps.failed == 1 and not any(name.startswith("receipt/") for name in step.metrics)
    assert [row.received_T for row in rows] == [None] * len(ROWS)


def test_part_of_the_responses_are_written_and_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, rows = update(monkeypatch, tmp_path, "algorithm.token_dump.responses=3")
    assert len(rows) == 3 and step.metrics["receipt/findings"] == 0
    for row in rows:
        assert row.received_T is not None
        assert row.received_T == pytest.approx(row.advantage_T, rel=1e-4, abs=1e-6)
