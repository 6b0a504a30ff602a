"""The token dump of a step, and what its tokens received: by verl's loss on log-probabilities that are made up."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from grail_advantage import Grail, Method, Rollouts
from grail_advantage.dump import DumpHeader, DumpOptions, choose_rows, read_dump, write_step
from grail_advantage.method import build
from grail_advantage.methods.turns import TurnRloo
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.exchange import LEAVE_OUT, PLACES, WATCHED, trains
from grail_advantage.verl_ext.host import turn_rewards_label
from grail_advantage.verl_ext.settings import Settings
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.worker import UpdateReader
from tests.core.tiny_models import END_ID
from tests.dumps import table_of
from tests.verl_ext.one_step import ROWS, Step, Workers, row_of

Patch = pytest.MonkeyPatch
ACTOR, DUMP = "actor_rollout_ref.actor", "algorithm.token_dump"
KEYS = [key for key, *_ in ROWS]


def test_options_are_off_by_default_and_else_as_given() -> None:
    def options(**section: Any) -> DumpOptions | None:
        config = OmegaConf.create({"algorithm": {"adv_estimator": "uniform", "token_dump": section or None}})
        return Settings.parse(config).dump

    assert options() is None and options(every=5) is None
    given = {"every": 10, "responses": None, "received": False}
    assert options(folder="/a/b", **given) == DumpOptions(folder=Path("/a/b"), **given)
    for name, value in (("every", 0), ("every", True), ("responses", 1.5), ("received", "no")):
        with pytest.raises(ValueError, match=name):
            options(folder="/a", **{name: value})


class TestChoice:
    GROUPS = (0, 1, 0, 2, 1, 2, 0, 1, 2, 3)
    VALID = (True,) * 9 + (False,)

    def _choose(self, limit: int | None, step: int = 1, update: int = 0) -> list[int]:
        return choose_rows(self.GROUPS, self.VALID, limit, (step, update))

    def test_all_rows_of_the_run(self) -> None:
        assert self._choose(None) == self._choose(100) == [0, 2, 6, 1, 4, 7, 3, 5, 8]
        assert choose_rows((), (), 3, (1, 0)) == [] and choose_rows((0,), (False,), None, (1, 0)) == []

    def test_whole_groups_as_many_as_fit_by_step_and_update(self) -> None:
        seen = set()
        for step in range(30):
            chosen = self._choose(7, step)
            assert len(chosen) == 6 and chosen == self._choose(7, step)
            seen.add(frozenset(self.GROUPS[row] for row in chosen))
        assert seen == {frozenset({0, 1}), frozenset({0, 2}), frozenset({1, 2})}, "no group is left out for ever"
        assert len({tuple(self._choose(3, step, update)) for step in range(5) for update in range(4)}) == 3

    def test_a_part_of_a_group_that_is_too_large_and_a_smaller_one_that_fills(self) -> None:
        chosen = self._choose(2)
        (group,) = {self.GROUPS[row] for row in chosen}
        assert chosen == [row for row in range(9) if self.GROUPS[row] == group][:2]
        assert all(len(choose_rows((0, 0, 1, 2, 2, 2), (True,) * 6, 3, (step, 0))) == 3 for step in range(10))


def test_rewards_by_turn_are_those_that_the_method_reads_or_else_the_usual_ones() -> None:
    extra = {"turn_scores": [], "tool_rewards": [0.5], "mine": [2], "reward_extra_info": {"turn_rewards": [1, -1.0]}}
    calls = {"call_rewards": [[1.0, 0.5], [None], [-1.0]], "tool_rewards": [1.0, 0.5, -1.0]}
    cut = {"tool_rewards": [1.0, 0.5]}
    cases: list[tuple[Any, Method, dict[str, int], list | None]] = [
        (extra, Grail(), {}, [1.0, -1.0]),
        (extra, TurnRloo(rewards="mine"), {}, [2.0]),
        (extra, Grail(), {"before": 1}, [-1.0]),  # the second response of a session
        (calls, Grail(), {"before": 1}, [[1.0, 0.5], [], [-1.0]]),
        (cut, TurnRloo(), {}, [1.0, 0.5]),
        (cut, TurnRloo(), {"turns": 2}, [[1.0], [0.5]]),  # the last call has no answer
        (cut, TurnRloo(), {"turns": 3}, [1.0, 0.5]),
        (calls | {"call_rewards": []}, TurnRloo(rewards="call_rewards"), {}, None),
        ({"tool_rewards": [0.5]}, TurnRloo(rewards=""), {}, [0.5]),
        *((nothing, Grail(), {}, None) for nothing in ({}, None)),
    ]
    for given, method, known, expected in cases:
        assert turn_rewards_label(given, method, **known) == ({} if expected is None else {"turn_rewards": expected})


class Silent:
    """What cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not now")


NAN = float("nan")
ACC = [
    *((value, "right") for value in (1, True, "1.0", np.float32(1), np.array(1), torch.tensor(1), torch.ones(1))),
    *((value, "wrong") for value in (0, False, "0", np.array(0.0), Decimal(0), -1.0)),
    *((value, None) for value in ("yes", [1], {"a": 1}, {}, np.ones(2), torch.ones(2), NAN, Silent(), b"\xff")),
]
"""Verdicts of a reward function, and the outcome that each gives."""
TRUTHS = [
    *((value, str(value)) for value in (Decimal("0.10"), b"7", {"a": 1}, [1, "b"], 1.5, True, np.int64(3))),
    *((None, None), (Silent(), None), ("\ud83dx", "\ufffdx")),
]
REWARDS = [
    *((value, [1.0]) for value in ([1], (1.0,), np.ones(1))),
    *((value, None) for value in ("ab", {"a": 1}, {1}, torch.ones(2), [NAN], [Silent()], [["a"]], 5, [torch.ones(1)])),
]
KNOWN = {
    "reward_model": {"ground_truth": 7},
    "extra_fields": {"reward_extra_info": {"acc": 0.0}},
    "data_source": "gsm8k",
    "extra_info": {"index": 4},
}
"""What the first response's data set and reward function say; they know nothing of the others."""


class Dumping(Step):
    """A step whose responses are written; the last one is cut off."""

    def __init__(self, monkeypatch: Patch, folder: Path, *overrides: str, **given: Any) -> None:
        known = {key: row_of(prompt, text.removesuffix("<end>"), reward) for key, prompt, text, reward in ROWS[-1:]}
        rows = {key: row_of(*said) for key, *said in ROWS} | known
        for key, row in rows.items():
            row |= KNOWN if key == "a_0_0" else {name: {} for name in KNOWN} | {"data_source": "gsm8k"}
        dump = (f"{DUMP}.folder={folder}", "algorithm.norm_adv_by_std_in_grpo=false")
        super().__init__(monkeypatch, *dump, *overrides, rows=rows, **given)
        self.trainer._context_length = len(rows["b_2_0"]["prompts"]) + len(rows["b_2_0"]["responses"])


class TestFacts:
    """The columns are those of a plain model, see ``test_hosts.py``; these tests are about what verl alone knows."""

    def test_facts_of_the_data_and_of_the_reward_function(self, tmp_path: Path, monkeypatch: Patch) -> None:
        step = Dumping(monkeypatch, tmp_path, f"{DUMP}.responses=null")
        step.run("a_1_0")
        for row in step.store.rows.values():  # what the run does to its tensors afterwards must not reach the file
            [row[name].fill_(99.0) for name in ("advantages", "old_log_probs", "entropy", "rm_scores")]
        rows = step.written()
        expected = [(key, reward) for key, *_, reward in ROWS if key != "a_1_0"]
        assert [(row.key, row.reward) for row in rows] == expected, "what fills up the batch is left out"
        assert all((row.old_log_prob_T < 0).all() and abs(row.advantage_T).max() < 10 for row in rows)
        facts = [(row.ground_truth, row.outcome, row.id, row.truncated) for row in rows]
        assert facts[0] == ("7", "wrong", "gsm8k/4", False), "acc goes first"
        assert facts[1:3] == [(None, outcome, None, False) for outcome in ("wrong", "right")] and facts[-1][-1]
        header = read_dump(tmp_path).files[0].header
        assert (header.step, header.method, header.temperature, header.rows_in_step) == (1, "grail", 1.0, 5)
        assert header.special_tokens[END_ID] == "<end>"
        json.dumps(header.options, allow_nan=False)

    @pytest.mark.parametrize("first", range(0, max(map(len, (ACC, TRUTHS, REWARDS))), 6))
    def test_a_value_of_an_odd_type_loses_its_label_alone(self, tmp_path: Path, monkeypatch: Patch, first: int) -> None:
        """One type beside another in one batch."""
        step = Dumping(monkeypatch, tmp_path)
        cases = [[of[(first + place) % len(of)] for of in (ACC, TRUTHS, REWARDS)] for place in range(len(ROWS))]
        for row, ((acc, _), (truth, _), (rewards, _)) in zip(step.store.rows.values(), cases, strict=True):
            row |= {"reward_model": {"ground_truth": truth}, "data_source": truth, "extra_info": {"index": acc}}
            row |= {"extra_fields": {"reward_extra_info": {"acc": acc, "turn_rewards": rewards}}}
        step.run()
        found = [[row.outcome, row.ground_truth, row.labels.get("turn_rewards")] for row in step.written()]
        assert found == [[expected for _, expected in case] for case in cases]
        assert step.trainer._dump.steps.failed == 0

    def test_every_so_many_steps_and_rows_of_every_update(self, tmp_path: Path, monkeypatch: Patch) -> None:
        """Updates share the responses of a step. A resumed run replaces its steps, those too that it does not write."""
        for number in (2, 3, 9):
            write_step(tmp_path, DumpHeader(step=number, method="grail"), table_of([]))
        step = Dumping(monkeypatch, tmp_path, f"{DUMP}.every=2", f"{DUMP}.responses=6")
        step.trainer._dump = UpdateDump(step.trainer.settings, step.trainer.tokenizer, updates=2)
        for step.trainer.global_steps in (3, 4, 5, 6):
            for step.trainer.local_trigger_step in (0, 1):
                step.run()
        found = [(row.step, row.update) for row in step.written()]
        assert read_dump(tmp_path).steps == [2, 4, 6]
        assert found == [(s, u) for s in (4, 6) for u in (0, 1) for _ in range(3)]

    def test_a_disk_that_fails_is_a_metric(self, tmp_path: Path, monkeypatch: Patch) -> None:
        folder = tmp_path / "folder"
        step = Dumping(monkeypatch, folder)
        folder.rmdir()
        folder.write_text("no folder")
        step.run()
        assert step.metrics["token_dump/failed_files"] == step.trainer._dump.steps.failed >= 1
        with pytest.raises(OSError, match="folder/below"):
            Dumping(monkeypatch, folder / "below")


class Alternating(Method):
    """Token advantages of both signs in a response."""

    names: ClassVar = {"alternating": {}}
    gives = "advantages"

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return r.advantages.unsqueeze(1) * (1.0 - 2.0 * (torch.arange(r.mask.shape[1]) % 2))


class Updating(Workers):
    """Workers of one rank whose update is verl's loss, in micro-batches of two, on log-probabilities without a model."""

    config: Any
    moved = 0.0
    """How far the policy is from the old one."""
    fault: Any = None

    def update_actor(self, batch: Any) -> Any:
        reader = self.reader = UpdateReader()
        worker: Any = SimpleNamespace(engine=None, loss_fn=lambda **given: ppo_loss(self.config, **given))
        data = self._data(batch)
        for _ in range(batch.extra_info["epochs"]):
            if WATCHED not in batch.extra_info:
                self._steps(worker, data)
                continue
            with reader.optimiser_step(worker, data, [int(self.store.rows[key][PLACES][0]) for key in batch.keys]):
                self._steps(worker, data)
        return super().update_actor(batch)

    def _data(self, batch: Any) -> Any:
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
            given = zip(micro["prompts"].offsets().diff().tolist(), micro["old_log_probs"].unbind(), strict=True)
            whole = [torch.cat([torch.zeros(n - 1), values + self.moved, torch.zeros(1)]) for n, values in given]
            log_probs = torch.nested.as_nested_tensor(whole, layout=torch.jagged).requires_grad_()
            loss, _ = worker.loss_fn(model_output={"log_probs": log_probs}, data=micro)
            (loss * (self.fault or 1.0)).backward()

    def take_received(self, number: str) -> list[Any]:
        return [self.reader.take(number), None]


class Moving(Updating):
    """Every forward finds each response's log-probabilities moved, by more from one to the next response."""

    forwards = 0

    def compute_log_prob(self, batch: Any) -> Any:
        for place, key in enumerate(super().compute_log_prob(batch).keys):
            row = self.store.rows[key]
            row["log_probs"] = row["log_probs"] + 0.01 * place * self.forwards
        self.forwards += 1
        return batch


class TestReceived:
    """From the trainer's step to the file of what tokens received."""

    @pytest.fixture
    def update(self, tmp_path: Path, monkeypatch: Patch) -> Any:
        def run(
            *overrides: str, method: Method | None = None, updating: type = Updating, **workers: Any
        ) -> tuple[Dumping, list[Any]]:
            options = (f"{DUMP}.responses=null", "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")
            step = Dumping(monkeypatch, tmp_path, *options, *overrides, method=method, workers=updating)
            actor = step.trainer.config.actor_rollout_ref.actor
            actor.ppo_micro_batch_size_per_gpu = 2
            vars(step.workers).update(config=omega_conf_to_dataclass(actor), **workers)
            step.run()
            written = step.update()
            assert WATCHED not in written.extra_info and written.fields == ["responses"]
            rows = step.written()
            for row in rows if not workers else ():
                assert (
                    row.received_T is None
                    or row.updates.tolist() == []
                    or row.received_T == pytest.approx(row.advantage_T, rel=1e-4, abs=1e-6)
                )
            return step, rows

        return run

    @pytest.mark.parametrize("skips", [False, True])
    @pytest.mark.parametrize("method", [Grail(), build("uniform"), Alternating()], ids=lambda method: method.name)
    def test_what_arrives_is_what_was_intended(
        self, method: Method, skips: bool, update: Any, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        """On policy, after one update: with every kind of method, also one whose token advantages have both signs."""
        monkeypatch.setattr(TokenWeightTrainer, "_skips", skips)
        step, rows = update(method=method)
        (header,) = read_dump(tmp_path).receipts()
        assert (header["findings"], header["loss"]) == ([], "vanilla")
        assert step.metrics["receipt/findings"] == step.metrics["receipt/clipped"] == 0
        assert step.metrics["token_dump/failed_files"] == 0 and len(rows) == len(ROWS)
        left_out = [row.key for row in rows if row.updates.tolist() != [0]]
        assert left_out == [row.key for row in rows if skips and not row.advantage_T[row.mask_T].any()]
        assert len(left_out) == skips

    @pytest.mark.parametrize("every", [0, 1])
    def test_the_effect_is_the_change_since_the_old_log_probabilities(self, every: int, update: Any) -> None:
        """By one more forward over the batch after the update, in the steps that ask for it; the figures are of it."""
        step, rows = update(f"{DUMP}.effect_every={every}", updating=Moving)
        assert step.workers.forwards == 1 + every
        assert ("grail/moved_with_advantage_rate" in step.metrics) == bool(every)
        for place, row in enumerate(rows):
            assert row.effect_T is None if not every else row.effect_T == pytest.approx(0.01 * place, abs=1e-6)

    def test_ratios_and_epochs(self, update: Any) -> None:
        """The policy has moved by a ratio of 1.5 in both epochs: where the advantage is positive the loss clips."""
        options = (f"{ACTOR}.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=True")
        step, rows = update(*options, moved=float(torch.tensor(1.5).log()))
        assert step.metrics["receipt/findings"] == 0 and 0 < step.metrics["receipt/clipped"] < 1
        for row in rows:
            wanted_T = np.where(row.advantage_T > 0, 0.0, 1.5 * row.advantage_T)
            assert row.updates.tolist() == [0, 1] and (row.clipped_T == (row.advantage_T > 0)).all()
            np.testing.assert_allclose(row.by_update_KT, np.stack([wanted_T] * 2), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(("workers", "name"), [({"fault": 0.25}, "scaled"), ({"moved": 0.1}, "stale")])
    def test_a_fault_is_found(self, workers: dict[str, float], name: str, update: Any, tmp_path: Path) -> None:
        """A loss that is a quarter of what it should be, and first ratios that are not 1."""
        step, _ = update(**workers)
        ((finding,),) = (header["findings"] for header in read_dump(tmp_path).receipts())
        assert finding["name"] == name and step.metrics["receipt/findings"] == 1
        assert finding["examples"][0][0] in KEYS

    def test_switched_off_nothing_is_asked_of_the_workers(self, update: Any, tmp_path: Path) -> None:
        step, rows = update(f"{DUMP}.received=false")
        (batch,) = step.workers.updates
        assert batch.fields == ["responses"] and not any(PLACES in row for row in step.store.rows.values())
        assert [row.received_T for row in rows] == [None] * len(ROWS) and not list(tmp_path.glob("received_*"))
        assert not any(name.startswith("receipt/") for name in step.metrics)

    def test_an_error_costs_the_file_alone(self, update: Any) -> None:
        step, rows = update(take_received=lambda number: [ZeroDivisionError("in a worker")])
        assert step.trainer._dump.steps.failed == 1 and not any(name.startswith("receipt/") for name in step.metrics)
        assert [row.received_T for row in rows] == [None] * len(ROWS)

    def test_part_of_the_responses_are_written_and_all_count(self, update: Any) -> None:
        step, rows = update(f"{DUMP}.responses=3")
        assert len(rows) == 3 and step.metrics["receipt/findings"] == 0
        assert all(row.received_T is not None for row in rows)
