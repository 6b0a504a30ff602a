"""The token dump of a step, and what its tokens received: by verl's loss on log-probabilities that are made up."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.trainer.ppo.v1 import PPOTrainerSync

from grail_advantage import AdvantageMethod, Grail, Method, Rollouts
from grail_advantage.dump import DumpHeader, DumpRow, choose_rows, read_dump, write_step
from grail_advantage.method import BaseMethod, build
from grail_advantage.verl_ext.exchange import PLACES
from grail_advantage.verl_ext.host import turn_rewards_label
from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT
from tests.core.tiny_models import END_ID
from tests.dumps import table_of
from tests.verl_ext.one_step import DUMP, ROWS, Step, plain_rows, row_of

KEYS = [key for key, *_ in ROWS]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
    st.integers(1, 14),
    st.integers(0, 99),
)
def test_whole_groups_as_many_as_fit_are_chosen(
    rows: list[tuple[int, bool]], limit: int, step: int
) -> None:
    """Group by group, without the rows that fill up the batch; only a first group that is larger than all is cut."""
    groups = [group for group, _ in rows]
    valid = [of_run for _, of_run in rows]
    everything = choose_rows(groups, valid, None, (step, 0))
    assert everything == sorted(
        (row for row, of_run in enumerate(valid) if of_run), key=lambda row: groups[row]
    )
    chosen = choose_rows(groups, valid, limit, (step, 0))
    assert (
        chosen
        == choose_rows(groups, valid, limit, (step, 0))
        == [row for row in everything if row in chosen]
    )
    sizes = Counter(groups[row] for row in everything)
    in_dump = Counter(groups[row] for row in chosen)
    cut = [group for group in in_dump if in_dump[group] < sizes[group]]
    assert len(chosen) <= limit and (not cut or (len(in_dump) == 1 and len(chosen) == limit))
    assert cut or all(
        size > limit - len(chosen) for group, size in sizes.items() if group not in in_dump
    )


def test_no_group_is_left_out_for_ever() -> None:
    assert (
        len(
            {
                tuple(choose_rows((0, 0, 1, 1, 2, 2), (True,) * 6, 4, (s, u)))
                for s in range(9)
                for u in (0, 1)
            }
        )
        == 3
    )


def test_rewards_by_turn_are_those_that_the_method_reads_or_else_the_usual_ones() -> None:
    of_reward_function = {
        "reward_extra_info": {"turn_rewards": [1, -1.0]},
        "turn_scores": [],
        "mine": [2],
    }
    of_reward_function["tool_rewards"] = [0.5]
    by_turn = {"call_rewards": [[1.0, 0.5], [None], [-1.0]], "tool_rewards": [1.0, 0.5, -1.0]}
    by_call = {"tool_rewards": [1.0, 0.5]}
    grail = build("grail")
    rloo = build("turn_rloo")

    def label(extra: Any, method: BaseMethod, **turns: int) -> list[Any] | None:
        return turn_rewards_label(extra, method, **turns).get("turn_rewards")

    assert label(of_reward_function, grail) == [1.0, -1.0], "the reward function's go first"
    assert label(of_reward_function, build("turn_rloo", {"rewards": "mine"})) == [2.0]
    assert label(of_reward_function, grail, turns_before=1) == [-1.0], (
        "the second response of a session"
    )
    assert label(by_turn, grail, turns_before=1) == [[1.0, 0.5], [], [-1.0]], (
        "calls are the response's own"
    )
    assert label(by_call, rloo) == [1.0, 0.5]
    assert label(by_call, rloo, turns=2) == [[1.0], [0.5]], (
        "one a turn, of which the last call has no answer"
    )
    assert label(by_call, rloo, turns=3) == [1.0, 0.5]
    assert (
        label({"call_rewards": [], **by_call}, build("turn_rloo", {"rewards": "call_rewards"}))
        is None
    )
    assert label({"tool_rewards": [0.5]}, build("turn_rloo", {"rewards": ""})) == [0.5], (
        "the usual ones"
    )
    assert label({}, grail) is None and label(None, grail) is None


class Silent:
    """What cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not now")


NAN = float("nan")
ODD = {
    "acc": [
        *((value, "right") for value in (True, "1.0", np.float32(1), torch.ones(1))),
        *((value, "wrong") for value in (0, "0", np.array(0.0), Decimal(0), -1.0)),
        *(
            (value, None)
            for value in ("yes", [1], {}, np.ones(2), torch.ones(2), NAN, Silent(), b"\xff")
        ),
    ],
    "truth": [
        *(
            (value, str(value))
            for value in (Decimal("0.10"), b"7", {"a": 1}, [1, "b"], 1.5, True, np.int64(3))
        ),
        (None, None),
        (Silent(), None),
        ("\ud83dx", "\ufffdx"),
    ],
    "rewards": [
        *((value, [1.0]) for value in ([1], (1.0,), np.ones(1))),
        *(
            (value, None)
            for value in ("ab", {"a": 1}, {1}, torch.ones(2), [NAN], [Silent()], [["a"]], 5)
        ),
    ],
}
"""Verdicts of a reward function, ground truths and rewards by turn, and what the dump has of each."""


class TestFacts:
    """The columns are those of a plain model, see ``test_hosts.py``; these tests are about what verl alone knows."""

    def test_facts_of_the_data_and_of_the_reward_function(self, tmp_path: Path) -> None:
        step = Step(f"{ROLLOUT}.temperature=0.5", folder=tmp_path)
        step.run("a_1_0")
        # What the run does to its tensors afterwards must not reach the file
        for row in step.store.rows.values():
            [
                row[name].fill_(99.0)
                for name in ("advantages", "old_log_probs", "entropy", "rm_scores")
            ]
        rows = step.written()
        expected = [(key, reward) for key, *_, reward in ROWS if key != "a_1_0"]
        assert [(row.key, row.reward) for row in rows] == expected, (
            "what fills up the batch is left out"
        )
        assert all(
            (row.old_log_prob_T < 0).all() and abs(row.advantage_T).max() < 10 for row in rows
        )
        facts = [(row.ground_truth, row.outcome, row.id, row.truncated) for row in rows]
        assert facts[0] == ("7", "wrong", "gsm8k/4", False), "acc goes first"
        assert (
            facts[1:3] == [(None, outcome, None, False) for outcome in ("wrong", "right")]
            and facts[-1][-1]
        )
        header = read_dump(tmp_path).files[0].header
        assert (header.step, header.method, header.temperature, header.rows_in_step) == (
            1,
            "grail",
            0.5,
            5,
        )
        assert header.special_tokens[END_ID] == "<end>"
        json.dumps(header.options, allow_nan=False)

    def test_a_value_of_an_odd_type_loses_its_label_alone(self, tmp_path: Path) -> None:
        """One type beside another in one batch."""
        cases = [
            [values[place % len(values)] for values in ODD.values()]
            for place in range(len(ODD["acc"]))
        ]
        rows = {}
        for place, ((acc, _), (truth, _), (rewards, _)) in enumerate(cases):
            row = rows[f"a_{place}_0"] = row_of(
                "Two?", "so " * place + r"\boxed{1}<end>", place % 2
            )
            row["reward_model"] = {"ground_truth": truth}
            row["data_source"] = truth
            row["extra_info"] = {"index": acc}
            row["extra_fields"] = {"reward_extra_info": {"acc": acc, "turn_rewards": rewards}}
        step = Step(rows=rows, folder=tmp_path)
        step.run()
        facts = [
            [row.outcome, row.ground_truth, row.labels.get("turn_rewards")]
            for row in step.written()
        ]
        assert facts == [[expected for _, expected in case] for case in cases]
        assert step.metrics["token_dump/failed_files"] == 0

    def test_a_list_for_a_session_goes_on_with_each_of_its_outputs(self, tmp_path: Path) -> None:
        """Of one, two and one turns."""
        rows = plain_rows()
        judged = {"reward_extra_info": {"turn_rewards": [1.0, 2.0, 3.0, 4.0]}}
        for number, parts in enumerate((["ask<end>"], ["again", "tool", "more<end>"], ["so<end>"])):
            rows[f"a_1_{number}"] = row_of("Two?", parts, 0.0, extra_fields=judged)
        step = Step(rows=rows, folder=tmp_path)
        step.run()
        labels = {row.key: row.labels.get("turn_rewards") for row in step.written()}
        assert [labels[f"a_1_{number}"][0] for number in range(3)] == [1.0, 2.0, 4.0]

    def test_every_so_many_steps_and_rows_of_every_update(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Updates share the responses of a step. A resumed run replaces its steps, those too that it does not write."""
        for number in (2, 3, 9):
            write_step(tmp_path, DumpHeader(step=number, method="grail"), table_of([]))
        step = Step(f"{DUMP}.every=2", f"{DUMP}.responses=6", folder=tmp_path)
        monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", lambda self: None)
        step.trainer.train_dataset = [{}]
        step.trainer.parameter_sync_step = 2
        step.trainer._init_dataloader()
        for step.trainer.global_steps in (3, 4, 5, 6):
            for step.trainer.local_trigger_step in (0, 1):
                step.run()
        written = [(row.step, row.update) for row in step.written()]
        assert read_dump(tmp_path).steps == [2, 4, 6]
        assert written == [(s, u) for s in (4, 6) for u in (0, 1) for _ in range(3)]


class Alternating(AdvantageMethod):
    """Token advantages of both signs in a response."""

    names: ClassVar = {"alternating": {}}

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return r.advantages.unsqueeze(1) * (1.0 - 2.0 * (torch.arange(r.mask.shape[1]) % 2))


class TestReceived:
    """From the trainer's step to the file of what tokens received."""

    @pytest.fixture
    def update(self, tmp_path: Path) -> Any:
        def run(
            *overrides: str, method: Method | None = None, skips: bool = False, **workers: Any
        ) -> tuple[Step, list[DumpRow]]:
            step = Step(*overrides, method=method, folder=tmp_path)
            vars(step.workers).update(workers)
            step.trainer._skips = skips
            step.run()
            step.update()
            rows = step.written()
            for row in rows if not workers.keys() - {"drift", "scaler"} else ():
                arrived = row.received_T is None or row.updates.tolist() == []
                assert arrived or row.received_T == pytest.approx(
                    row.advantage_T, rel=1e-4, abs=1e-6
                )
            return step, rows

        return run

    @pytest.mark.parametrize("skips", [False, True])
    @pytest.mark.parametrize(
        "method", [Grail(), build("uniform"), Alternating()], ids=lambda method: method.name
    )
    def test_what_arrives_is_what_was_intended(
        self, method: Method, skips: bool, update: Any, tmp_path: Path
    ) -> None:
        """On policy, after one update: with every kind of method, also one whose token advantages have both signs."""
        step, rows = update(method=method, skips=skips)
        (header,) = read_dump(tmp_path).receipts()
        assert (header["findings"], header["loss"]) == ([], "vanilla")
        assert step.metrics["receipt/findings"] == step.metrics["receipt/clipped"] == 0
        assert step.metrics["token_dump/failed_files"] == 0 and len(rows) == len(ROWS)
        left_out = [row.key for row in rows if row.updates.tolist() != [0]]
        assert left_out == [
            row.key for row in rows if skips and not row.advantage_T[row.mask_T].any()
        ]
        assert len(left_out) == skips

    @pytest.mark.parametrize("period", [0, 1])
    def test_the_effect_is_the_change_since_the_old_log_probabilities(
        self, period: int, update: Any
    ) -> None:
        """By one more forward over the batch after the update, in the steps that ask for it; the figures are of it."""
        step, rows = update(
            f"{DUMP}.effect_every={period}", f"{ROLLOUT}.temperature=0.5", drift=0.01
        )
        assert step.workers.forwards == 1 + period
        assert ("grail/moved_with_advantage_rate" in step.metrics) == bool(period)
        for place, row in enumerate(rows):
            assert (
                row.effect_T is None
                if not period
                else row.effect_T == pytest.approx(0.02 * place, abs=1e-6)
            )

    def test_ratios_and_epochs(self, update: Any) -> None:
        """The policy has moved by a ratio of 1.5 in both epochs: where the advantage is positive the loss clips."""
        options = (f"{ACTOR}.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=True")
        step, rows = update(*options, moved=float(torch.tensor(1.5).log()))
        assert step.metrics["receipt/findings"] == 0 and 0 < step.metrics["receipt/clipped"] < 1
        for row in rows:
            wanted_T = np.where(row.advantage_T > 0, 0.0, 1.5 * row.advantage_T)
            assert row.updates.tolist() == [0, 1] and (row.clipped_T == (row.advantage_T > 0)).all()
            np.testing.assert_allclose(
                row.by_update_KT, np.stack([wanted_T] * 2), rtol=1e-4, atol=1e-6
            )

    @pytest.mark.parametrize(
        ("workers", "name"), [({"fault": 0.25}, "scaled"), ({"moved": 0.1}, "stale")]
    )
    def test_a_fault_is_found(
        self, workers: dict[str, float], name: str, update: Any, tmp_path: Path
    ) -> None:
        """A loss that is a quarter of what it should be, and first ratios that are not 1."""
        step, _ = update(**workers)
        ((finding,),) = (header["findings"] for header in read_dump(tmp_path).receipts())
        assert finding["name"] == name and step.metrics["receipt/findings"] == 1
        assert finding["examples"][0][0] in KEYS

    def test_the_scale_of_losses_in_float16_is_divided_out(self, update: Any) -> None:
        """That of the backward, not the one that the optimiser's step leaves."""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step, _ = update(scaler=scaler)
        assert step.metrics["receipt/findings"] == 0 and scaler.get_scale() == 2048

    @pytest.mark.parametrize(("number", "findings"), [(0, 1), (1, 0)])
    def test_before_a_later_update_of_a_step_the_policy_has_moved(
        self, number: int, findings: int, tmp_path: Path
    ) -> None:
        """With ``separate_async``, so that ratios differ from 1 there; before the first update they must not."""
        rows = {
            key: {**row, "old_log_probs": row["rollout_log_probs"]}
            for key, row in plain_rows().items()
        }
        step = Step(method=build("uniform"), rows=rows, folder=tmp_path, mode="separate_async")
        step.workers.moved = 0.1
        step.trainer.local_trigger_step = number
        step.run()
        step.update()
        assert step.metrics["receipt/findings"] == findings
        assert {(row.update, row.received_T is None) for row in step.written()} == {(number, False)}

    def test_a_loss_without_a_formula_is_no_mismatch(self, tmp_path: Path) -> None:
        def half(old_log_prob: Any, log_prob: torch.Tensor, *_: Any, **__: Any) -> Any:
            return 0.5 * log_prob.mean(), {}

        register_policy_loss("half")(half)
        try:
            step = Step(f"{ACTOR}.policy_loss.loss_mode=half", folder=tmp_path)
            step.run()
            step.update()
        finally:
            del POLICY_LOSS_REGISTRY["half"]
        assert step.metrics["receipt/findings"] == 0
        (header,) = read_dump(tmp_path).receipts()
        assert [finding["name"] for finding in header["findings"]] == ["unknown loss"]

    def test_switched_off_nothing_is_asked_of_the_workers(
        self, update: Any, tmp_path: Path
    ) -> None:
        step, rows = update(f"{DUMP}.received=false")
        assert not any(PLACES in row for row in step.store.rows.values())
        assert [row.received_T for row in rows] == [None] * len(ROWS) and not list(
            tmp_path.glob("received_*")
        )
        assert not any(name.startswith("receipt/") for name in step.metrics)

    def test_an_error_in_the_watch_costs_the_file_alone(self, update: Any) -> None:
        step, rows = update(reads=False)
        assert step.trainer._dump.steps.failed == 1 and not any(
            name.startswith("receipt/") for name in step.metrics
        )
        assert [row.received_T for row in rows] == [None] * len(ROWS)

    def test_a_receipt_is_of_its_own_update_and_given_out_once(self, tmp_path: Path) -> None:
        """Also after an update of which nobody took it."""
        step = Step(folder=tmp_path)
        for step.trainer.global_steps, error in ((1, RuntimeError), (2, None)):
            step.run()
            with patch.object(
                step.workers, "take_received", wraps=step.workers.take_received, side_effect=error
            ):
                step.update()
        assert step.trainer._dump.steps.failed == 1 and step.metrics["receipt/findings"] == 0
        assert [header["step"] for header in read_dump(tmp_path).receipts()] == [2]
        assert isinstance(step.workers.take_received("2.0")[0], RuntimeError)

    def test_part_of_the_responses_are_written_and_all_count(self, update: Any) -> None:
        step, rows = update(f"{DUMP}.responses=3")
        assert len(rows) == 3 and step.metrics["receipt/findings"] == 0
        assert all(row.received_T is not None for row in rows)
