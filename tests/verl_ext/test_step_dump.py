"""Options of the token dump, its choice of responses, and its files, from the trainer without Ray or a model."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from grail_advantage import Grail
from grail_advantage.dump import DumpHeader, DumpOptions, DumpRow, choose_rows, read_dump, write_step
from grail_advantage.methods.turns import TurnRloo
from grail_advantage.verl_ext.dump import UpdateDump, turn_rewards_label
from grail_advantage.verl_ext.settings import Settings
from tests.core.tiny_models import END_ID
from tests.dumps import table_of
from tests.verl_ext.test_one_step import ROWS, Step


def _options(**section: Any) -> DumpOptions | None:
    config = OmegaConf.create({"algorithm": {"adv_estimator": "uniform", "token_dump": section or None}})
    return Settings.parse(config).dump


def test_options_are_off_by_default_and_else_as_given() -> None:
    assert _options() is None and _options(every=5) is None
    assert _options(folder="/a/b") == DumpOptions(folder=Path("/a/b"))
    given = {"every": 10, "responses": None, "received": False}
    assert _options(folder="/a/b", **given) == DumpOptions(folder=Path("/a/b"), **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("every", 0), ("every", None), ("every", True), ("responses", 0), ("responses", 1.5), ("received", "no")],
)
def test_values_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"(?s)token_dump.*{name}"):
        _options(folder="/a", **{name: value})


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
        assert sorted(choose_rows((0, 0, 0, 1), (True,) * 4, 3, (1, 0))) in ([0, 1, 2], [0, 1, 3])
        assert all(len(choose_rows((0, 0, 1, 2, 2, 2), (True,) * 6, 3, (step, 0))) == 3 for step in range(10))


KNOWN = {
    "reward_model": {"ground_truth": 7},
    "extra_fields": {"reward_extra_info": {"acc": 0.0}},
    "data_source": "gsm8k",
    "extra_info": {"index": 4},
}
"""What the first response's data set and reward function say; they know nothing of the others."""


class Dumping(Step):
    """A step whose responses are written; the last one is cut off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> None:
        dump = (f"algorithm.token_dump.folder={folder}", "algorithm.norm_adv_by_std_in_grpo=false")
        super().__init__(monkeypatch, [*dump, *overrides])
        for key, row in self.store.rows.items():
            row |= KNOWN if key == "a_0_0" else {name: {} for name in KNOWN} | {"data_source": "gsm8k"}
        last = self.store.rows["b_2_0"]
        for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores"):
            last[name] = last[name][:-1]
        self.trainer._context_length = len(last["prompts"]) + len(last["responses"])
        self.trainer._dump = self._dump(1)

    def _dump(self, updates: int) -> UpdateDump:
        trainer = self.trainer
        return UpdateDump(trainer.settings, trainer.tokenizer, updates=updates)

    def close(self, folder: Path) -> list[DumpRow]:
        dump = read_dump(folder)
        rows = list(dump)
        assert dump.problems == []
        return rows


def test_rewards_by_turn_are_those_that_the_method_reads_or_else_the_usual_ones() -> None:
    extra = {"turn_scores": [], "tool_rewards": [0.5], "mine": [2], "reward_extra_info": {"turn_rewards": [1, -1.0]}}
    assert turn_rewards_label(extra, Grail()) == {"turn_rewards": [1.0, -1.0]}
    assert turn_rewards_label(extra, TurnRloo(rewards="mine")) == {"turn_rewards": [2.0]}
    assert turn_rewards_label(extra, Grail(), before=1) == {"turn_rewards": [-1.0]}, "the second response of a session"
    calls = {"call_rewards": [[1.0, 0.5], [None], [-1.0]], "tool_rewards": [1.0, 0.5, -1.0]}
    assert turn_rewards_label(calls, Grail(), before=1) == {"turn_rewards": [[1.0, 0.5], [], [-1.0]]}
    cut = {"tool_rewards": [1.0, 0.5]}
    assert turn_rewards_label(cut, TurnRloo()) == {"turn_rewards": [1.0, 0.5]}
    assert turn_rewards_label(cut, TurnRloo(), turns=2) == {"turn_rewards": [[1.0], [0.5]]}, (
        "the last call has no answer"
    )
    assert turn_rewards_label(cut, TurnRloo(), turns=3) == {"turn_rewards": [1.0, 0.5]}
    assert turn_rewards_label(calls | {"call_rewards": []}, TurnRloo(rewards="call_rewards")) == {}
    del extra["reward_extra_info"]
    for signal in (Grail(), TurnRloo(rewards="")):
        assert turn_rewards_label(extra, signal) == {"turn_rewards": [0.5]}
        assert turn_rewards_label({}, signal) == turn_rewards_label(None, signal) == {}


class Silent:
    """What cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not now")


NAN = float("nan")
ACC = [
    *((value, "right") for value in (1, True, "1.0", np.float32(1), np.array(1), torch.tensor(1), torch.ones(1))),
    *((value, "wrong") for value in (0, False, "0", np.array(0.0), Decimal(0), -1.0)),
    *(
        (value, None)
        for value in ("yes", "", [1], (1,), {"a": 1}, {}, np.ones(2), torch.ones(2), NAN, Silent(), b"\xff")
    ),
]
"""Verdicts of a reward function, and the outcome that each gives."""
TRUTHS = [
    *((value, str(value)) for value in (Decimal("0.10"), b"7", {"a": 1}, [1, "b"], 1.5, True, np.int64(3))),
    *((value, None) for value in (None, Silent())),
    ("\ud83dx", "\ufffdx"),
]
REWARDS = [
    *((value, [1.0]) for value in ([1], (1.0,), np.ones(1))),
    *((value, None) for value in ("ab", {"a": 1}, {1}, torch.ones(2), [NAN], [Silent()], [["a"]], 5, [torch.ones(1)])),
]


class TestRun:
    """The columns are those of a plain model, see ``test_hosts.py``; these tests are about what verl alone knows."""

    def test_facts_of_the_data_and_of_the_reward_function(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = Dumping(monkeypatch, tmp_path, "algorithm.token_dump.responses=null")
        step.run()
        for row in step.store.rows.values():  # what the run does to its tensors afterwards must not reach the file
            [row[name].fill_(99.0) for name in ("advantages", "old_log_probs", "entropy", "rm_scores")]
        rows = step.close(tmp_path)
        assert [(row.key, row.reward) for row in rows] == [(key, reward) for key, _, _, reward in ROWS]
        assert all((row.old_log_prob_T < 0).all() and abs(row.advantage_T).max() < 10 for row in rows)
        facts = [(row.ground_truth, row.outcome, row.id) for row in rows[:4]]
        assert facts[0] == ("7", "wrong", "gsm8k/4"), "acc goes first"
        assert facts[1:] == [(None, outcome, None) for outcome in ("wrong", "wrong", "right")]
        header = read_dump(tmp_path).files[0].header
        assert (header.step, header.method, header.temperature) == (1, "grail", 1.0)
        assert (header.rows_in_step, header.special_tokens[END_ID]) == (6, "<end>")
        assert header.options["preset"] == "official"
        json.dumps(header.options, allow_nan=False)

    @pytest.mark.parametrize("first", range(0, max(map(len, (ACC, TRUTHS, REWARDS))), 6))
    def test_a_value_of_an_odd_type_loses_its_label_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
    ) -> None:
        """One type beside another in one batch."""
        step = Dumping(monkeypatch, tmp_path)
        for number, row in enumerate(step.store.rows.values(), start=first):
            (acc, _), (truth, _), (rewards, _) = (cases[number % len(cases)] for cases in (ACC, TRUTHS, REWARDS))
            row |= {"reward_model": {"ground_truth": truth}, "data_source": truth, "extra_info": {"index": acc}}
            row |= {"extra_fields": {"reward_extra_info": {"acc": acc, "turn_rewards": rewards}}}
        step.run()
        rows = step.close(tmp_path)
        assert step.trainer._dump.steps.failed == 0 and len(rows) == len(ROWS)
        for number, row in enumerate(rows, start=first):
            outcome, truth, rewards = (cases[number % len(cases)][1] for cases in (ACC, TRUTHS, REWARDS))
            assert (row.outcome, row.ground_truth) == (outcome, truth)
            assert row.labels.get("turn_rewards") == rewards

    def test_responses_that_fill_up_the_batch_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = Dumping(monkeypatch, tmp_path)
        step.store.tags["a_1_0"] = {"is_padding": True}
        step.run()
        assert [row.key for row in step.close(tmp_path)] == [key for key, *_ in ROWS if key != "a_1_0"]
        assert read_dump(tmp_path).files[0].header.rows_in_step == 5

    def test_every_so_many_steps_and_rows_of_every_update(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Updates share the responses of a step. A resumed run replaces its steps, those too that it does not write."""
        for number in (2, 3, 9):
            write_step(tmp_path, DumpHeader(step=number, method="grail"), table_of([]))
        step = Dumping(monkeypatch, tmp_path, "algorithm.token_dump.every=2", "algorithm.token_dump.responses=6")
        step.trainer._dump = step._dump(updates=2)
        for step.trainer.global_steps in (3, 4, 5, 6):
            for step.trainer.local_trigger_step in (0, 1):
                step.run()
        rows = step.close(tmp_path)
        assert read_dump(tmp_path).steps == [2, 4, 6]
        assert [(row.step, row.update) for row in rows] == [(s, u) for s in (4, 6) for u in (0, 1) for _ in range(3)]

    def test_a_disk_that_fails_is_a_metric(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "folder"
        step = Dumping(monkeypatch, folder)
        folder.rmdir()
        folder.write_text("no folder")
        step.run()
        assert step.trainer._dump.steps.failed >= 1
        with pytest.raises(OSError, match="folder/below"):
            Dumping(monkeypatch, folder / "below")
