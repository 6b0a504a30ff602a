"""The token dump of a step, and what its tokens received: by verl's loss on log-probabilities that are made up."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.v1 import PPOTrainerSync

from grail_advantage import AdvantageMethod, Grail, Rollouts
from grail_advantage.dump import DumpHeader, DumpRow, choose_rows, read_dump, write_step
from grail_advantage.method import build
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
def test_whole_groups_as_many_as_fit_are_chosen(rows, limit, step):
    """Group by group, without the rows that fill up the batch; only a first group that is larger than all is cut."""
    groups = [group for group, _ in rows]
    valid = [of_run for _, of_run in rows]
    everything = choose_rows(groups, valid, None, (step, 0))
    ours = [row for row, of_run in enumerate(valid) if of_run]
    assert everything == sorted(ours, key=lambda row: groups[row])
    chosen = choose_rows(groups, valid, limit, (step, 0))
    assert chosen == [row for row in everything if row in chosen] and len(chosen) <= limit
    in_dump = {groups[row] for row in chosen}
    outside = Counter(groups[row] for row in everything if row not in chosen)
    if in_dump & outside.keys():
        assert len(in_dump) == 1 and len(chosen) == limit
    else:
        # As many as fit: each group outside is larger than the room that is left.
        assert all(size > limit - len(chosen) for size in outside.values())


def test_no_group_is_left_out_for_ever():
    """Of three groups of two, two fit: each pair of them is chosen by some update."""
    groups = (0, 0, 1, 1, 2, 2)
    chosen = {tuple(choose_rows(groups, (True,) * 6, 4, (step, 0))) for step in range(18)}
    assert len(chosen) == 3


BY_TURN = {"call_rewards": [[1.0, 0.5], [None], [-1.0]], "tool_rewards": [1.0, 0.5, -1.0]}
BY_CALL = {"tool_rewards": [1.0, 0.5]}
JUDGED = {"reward_extra_info": {"turn_rewards": [1, -1.0]}, "mine": [2], **BY_CALL}
LABELS = [
    # The reward function's go first. Its list is of the session, of which a response before had the first turn.
    (None, JUDGED, 0, 0, [1.0, -1.0]),
    (None, JUDGED, 1, 0, [-1.0]),
    # The method reads a field of its own.
    ("mine", JUDGED, 0, 0, [2.0]),
    # Calls are the response's own; of two turns two rewards are one each, of three nothing is certain.
    (None, BY_TURN, 1, 0, [[1.0, 0.5], [], [-1.0]]),
    ("tool_rewards", BY_CALL, 0, 2, [[1.0], [0.5]]),
    ("tool_rewards", BY_CALL, 0, 3, [1.0, 0.5]),
    # The field that the method reads says that there are none; the method reads none.
    ("call_rewards", {"call_rewards": [], **BY_CALL}, 0, 0, None),
    ("", BY_CALL, 0, 0, [1.0, 0.5]),
    (None, None, 0, 0, None),
]
"""Field that a method by turn reads, if it is one; what verl has; turns before, and certain ones; the label."""


@pytest.mark.parametrize(("field", "extra", "turns_before", "turns", "expected"), LABELS)
def test_rewards_by_turn_are_those_that_the_method_reads_or_else_the_usual_ones(
    field, extra, turns_before, turns, expected
):
    method = build("grail") if field is None else build("turn_rloo", {"rewards": field})
    label = turn_rewards_label(extra, method, turns_before, turns)
    assert label.get("turn_rewards") == expected


class Silent:
    """What cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not now")


NAN = float("nan")
ODD = {
    "acc": [
        *((value, "right") for value in (True, "1.0", torch.ones(1))),
        *((value, "wrong") for value in (0, np.array(0.0), Decimal(0))),
        *((value, None) for value in ("yes", [1], torch.ones(2), NAN, Silent())),
    ],
    "truth": [
        *((value, str(value)) for value in (Decimal("0.10"), b"7", [1, "b"])),
        (None, None),
        (Silent(), None),
        ("\ud83dx", "\ufffdx"),
    ],
    "rewards": [
        *((value, [1.0]) for value in ((1.0,), np.ones(1))),
        *(
            (value, None)
            for value in ("ab", {"a": 1}, torch.ones(2), [NAN], [Silent()], [["a"]], 5)
        ),
    ],
}
"""Verdicts of a reward function, ground truths and rewards by turn, and what the dump has of each."""


class TestFacts:
    """The columns are those of a plain model, see ``test_hosts.py``; these tests are about what verl alone knows."""

    def test_facts_of_the_data_and_of_the_reward_function(self, tmp_path):
        step = Step(f"{ROLLOUT}.temperature=0.5", folder=tmp_path)
        step.run("a_1_0")
        for row in step.rows.values():
            # What the run does to its tensors afterwards must not reach the file.
            for name in ("advantages", "old_log_probs", "entropy", "rm_scores"):
                row[name].fill_(99.0)
        rows = step.written()
        # What fills up the batch is left out.
        expected = [(key, reward) for key, *_, reward in ROWS if key != "a_1_0"]
        assert [(row.key, row.reward) for row in rows] == expected
        for row in rows:
            assert (row.old_log_prob_T < 0).all() and abs(row.advantage_T).max() < 10
        facts = [(row.ground_truth, row.outcome, row.id) for row in rows]
        # The reward function's verdict, of the first response, goes before its reward.
        assert facts[0] == ("7", "wrong", "gsm8k/4")
        assert facts[1:3] == [(None, "wrong", None), (None, "right", None)]
        assert [row.truncated for row in rows] == [False] * 4 + [True]
        header = read_dump(tmp_path).files[0].header
        assert (header.step, header.method) == (1, "grail")
        assert (header.temperature, header.rows_in_step) == (0.5, 5)
        assert header.special_tokens[END_ID] == "<end>"
        json.dumps(header.options, allow_nan=False)

    def test_a_value_of_an_odd_type_loses_its_label_alone(self, tmp_path):
        """One type beside another in one batch."""
        rows = {}
        expected = []
        cases = map(itertools.cycle, (ODD["truth"], ODD["rewards"]))
        for place, (verdict, truth, rewards) in enumerate(
            zip(ODD["acc"], *cases, strict=False)
        ):
            text = "so " * place + r"\boxed{1}<end>"
            info = {"acc": verdict[0], "turn_rewards": rewards[0]}
            rows[f"a_{place}_0"] = row_of(
                "Two?",
                text,
                place % 2,
                reward_model={"ground_truth": truth[0]},
                data_source=truth[0],
                extra_info={"index": verdict[0]},
                extra_fields={"reward_extra_info": info},
            )
            expected.append([verdict[1], truth[1], rewards[1]])
        step = Step(rows=rows, folder=tmp_path)
        step.run()
        facts = [
            [row.outcome, row.ground_truth, row.labels.get("turn_rewards")]
            for row in step.written()
        ]
        assert facts == expected
        assert step.metrics["token_dump/failed_files"] == 0

    def test_a_list_for_a_session_goes_on_with_each_of_its_outputs(self, tmp_path):
        """Of one, two and one turns."""
        rows = plain_rows()
        judged = {"reward_extra_info": {"turn_rewards": [1.0, 2.0, 3.0, 4.0]}}
        for number, parts in enumerate(
            (["ask<end>"], ["again", "tool", "more<end>"], ["so<end>"])
        ):
            rows[f"a_1_{number}"] = row_of("Two?", parts, 0.0, extra_fields=judged)
        step = Step(rows=rows, folder=tmp_path)
        step.run()
        labels = {row.key: row.labels.get("turn_rewards") for row in step.written()}
        assert [labels[f"a_1_{number}"][0] for number in range(3)] == [1.0, 2.0, 4.0]

    def test_every_so_many_steps_and_rows_of_every_update(self, tmp_path, monkeypatch):
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
        # Six responses for two updates of a step: a group of three each.
        assert written == [(s, u) for s in (4, 6) for u in (0, 1) for _ in range(3)]


class Alternating(AdvantageMethod):
    """Token advantages of both signs in a response."""

    names: ClassVar = {"alternating": {}}

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return r.advantages.unsqueeze(1) * (1.0 - 2.0 * (torch.arange(r.mask.shape[1]) % 2))


def assert_arrived(rows: Sequence[DumpRow]):
    """That each response of the update received what was intended."""
    for row in rows:
        if row.updates.tolist():
            np.testing.assert_allclose(
                row.received_T, row.advantage_T, rtol=1e-4, atol=1e-6
            )


class TestReceived:
    """From the trainer's step to the file of what tokens received."""

    @pytest.mark.parametrize("skips", [False, True])
    @pytest.mark.parametrize(
        "method", [Grail(), build("uniform"), Alternating()], ids=lambda method: method.name
    )
    def test_what_arrives_is_what_was_intended(self, method, skips, tmp_path):
        """On policy, after one update: with every kind of method, also one whose token advantages have both signs."""
        step = Step(method=method, folder=tmp_path)
        step.trainer._skips = skips
        rows = step.train()
        assert_arrived(rows)
        (header,) = read_dump(tmp_path).receipts()
        assert (header["findings"], header["loss"]) == ([], "vanilla")
        assert step.metrics["receipt/findings"] == step.metrics["receipt/clipped"] == 0
        assert step.metrics["token_dump/failed_files"] == 0
        # The truncated response alone has no advantage.
        trained = KEYS[:-1] if skips else KEYS
        assert [row.key for row in rows if row.updates.tolist() == [0]] == trained

    @pytest.mark.parametrize("period", [0, 1])
    def test_the_effect_is_the_change_since_the_old_log_probabilities(
        self, period, tmp_path
    ):
        """By one more forward over the batch after the update, in the steps that ask for it; the figures are of it."""
        options = (f"{DUMP}.effect_every={period}", f"{ROLLOUT}.temperature=0.5")
        step = Step(*options, folder=tmp_path)
        step.workers.drift = 0.01
        rows = step.train()
        assert_arrived(rows)
        assert step.workers.forwards == 1 + period
        assert ("grail/moved_with_advantage_rate" in step.metrics) == bool(period)
        for place, row in enumerate(rows):
            # A drift of 0.01 at temperature 0.5.
            effect = pytest.approx(0.02 * place, abs=1e-6) if period else None
            assert row.effect_T == effect

    def test_ratios_and_epochs(self, tmp_path):
        """The policy has moved by a ratio of 1.5 in both epochs: where the advantage is positive the loss clips."""
        # Without a factor this sum is divided by the longest response of each micro-batch.
        aggregation = (
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
            f"{ACTOR}.loss_scale_factor=null",
        )
        options = (f"{ACTOR}.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=True")
        step = Step(*aggregation, *options, folder=tmp_path)
        step.workers.moved = math.log(1.5)
        rows = step.train()
        assert step.metrics["receipt/findings"] == 0
        assert 0 < step.metrics["receipt/clipped"] < 1
        for row in rows:
            clips_T = row.advantage_T > 0
            expected_T = np.where(clips_T, 0.0, 1.5 * row.advantage_T)
            assert row.updates.tolist() == [0, 1] and (row.clipped_T == clips_T).all()
            for received_T in row.by_update_KT:
                np.testing.assert_allclose(received_T, expected_T, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(
        ("field", "value", "number", "expected"),
        [
            ("fault", 0.25, 0, ["scaled"]),
            ("moved", 0.1, 0, ["stale"]),
            ("moved", 0.1, 1, []),
        ],
    )
    def test_a_fault_is_found(self, field, value, number, expected, tmp_path):
        """A loss that is a quarter of what it should be, and ratios that are not 1: before a later update of a step of
        ``separate_async`` the policy has moved."""
        step = Step(method=build("uniform"), folder=tmp_path, mode="separate_async")
        for row in step.rows.values():
            row["old_log_probs"] = row["rollout_log_probs"]
        setattr(step.workers, field, value)
        # As if other updates of the step had come before.
        step.trainer.local_trigger_step = number
        rows = step.train()
        (header,) = read_dump(tmp_path).receipts()
        findings = header["findings"]
        assert [finding["name"] for finding in findings] == expected
        assert step.metrics["receipt/findings"] == len(expected)
        assert all(finding["examples"][0][0] in KEYS for finding in findings)
        assert all(row.update == number and row.received_T is not None for row in rows)

    def test_the_scale_of_losses_in_float16_is_divided_out(self, tmp_path):
        """That of the backward, not the one that the optimiser's step leaves."""
        step = Step(folder=tmp_path)
        step.workers.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        assert_arrived(step.train())
        assert step.metrics["receipt/findings"] == 0
        assert step.workers.scaler.get_scale() == 2048

    def test_a_loss_without_a_formula_is_no_mismatch(self, tmp_path):
        step = Step(f"{ACTOR}.policy_loss.loss_mode=clip_cov", folder=tmp_path)
        step.train()
        assert step.metrics["receipt/findings"] == 0
        (header,) = read_dump(tmp_path).receipts()
        assert [finding["name"] for finding in header["findings"]] == ["unknown loss"]

    @pytest.mark.parametrize("received", [False, True])
    def test_switched_off_or_after_an_error_the_file_alone_is_missing(
        self, received, tmp_path
    ):
        """Off, nothing is asked of the workers."""
        step = Step(f"{DUMP}.received={received}", folder=tmp_path)
        step.workers.reads = False
        rows = step.train()
        assert step.trainer._dump.steps.failed == received
        assert received == any(PLACES in row for row in step.rows.values())
        assert [row.received_T for row in rows] == [None] * len(ROWS)
        assert not [*tmp_path.glob("received_*")]
        assert not any(name.startswith("receipt/") for name in step.metrics)

    def test_a_receipt_is_of_its_own_update_and_given_out_once(self, tmp_path):
        """Also after an update of which nobody took it."""
        step = Step(folder=tmp_path)
        with patch.object(step.workers, "take_received", side_effect=RuntimeError):
            step.train()
        step.trainer.global_steps = 2
        step.train()
        assert step.trainer._dump.steps.failed == 1
        assert step.metrics["receipt/findings"] == 0
        assert [header["step"] for header in read_dump(tmp_path).receipts()] == [2]
        # The trainer has taken it already.
        assert isinstance(step.workers.take_received("2.0")[0], RuntimeError)

    def test_part_of_the_responses_are_written_and_all_count(self, tmp_path):
        step = Step(f"{DUMP}.responses=3", folder=tmp_path)
        rows = step.train()
        assert_arrived(rows)
        assert len(rows) == 3 and step.metrics["receipt/findings"] == 0
        assert all(row.received_T is not None for row in rows)
