"""What the trainer puts into the token dump, and which rows, without Ray or a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from grail_advantage import AnswerSpan, GrailConfig, RolloutBatch
from grail_advantage.methods import methods
from grail_advantage.step_dump import choose_rows, neutral_reasons, size_estimate
from grail_advantage.token_dump import DumpHeader, DumpRow, read_dump, write_step
from grail_advantage.verl_ext import update_dump
from grail_advantage.verl_ext.selection import Selection
from grail_advantage.verl_ext.settings import DumpOptions, dump_options
from grail_advantage.verl_ext.trainers import TokenWeightTrainerSync
from grail_advantage.verl_ext.update_dump import UpdateDump
from tests.core.tiny_models import char_tokenizer, encode


class TestOptions:
    @staticmethod
    def _options(**section: Any) -> DumpOptions | None:
        return dump_options(OmegaConf.create({"algorithm": {"token_dump": section}}))

    def test_are_off_by_default_and_else_as_given(self) -> None:
        assert self._options() is None and self._options(every=5) is None
        assert dump_options(OmegaConf.create({"algorithm": {}})) is None
        assert dump_options(OmegaConf.create({"algorithm": {"token_dump": None}})) is None
        assert self._options(folder="/a/b") == DumpOptions(Path("/a/b"), 1, 64)
        assert self._options(folder="/a/b", every=10, rows=None) == DumpOptions(Path("/a/b"), 10, None)

    def test_a_relative_folder_is_refused_with_the_absolute_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/me")
        with pytest.raises(ValueError, match=rf"folder=runs/a must be an absolute path.*; use {tmp_path}/runs/a$"):
            self._options(folder="runs/a")
        with pytest.raises(ValueError, match=r"; use /home/me/a$"):
            self._options(folder="~/a")

    def test_refuses_other_numbers(self) -> None:
        for value in (0, None, True):
            with pytest.raises(
                ValueError, match=rf"algorithm\.token_dump\.every={value} must be a whole number of steps, at"
            ):
                self._options(folder="/a", every=value)
        for value in (0, 1.5):
            with pytest.raises(
                ValueError, match=rf"token_dump\.rows={value} must be a whole number, at least 1, or null"
            ):
                self._options(folder="/a", rows=value)


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


class TestReasons:
    def _reasons(self, signal: Any, **changes: Any) -> list[str | None]:
        """Rows: scored, non-finite, rejected, truncated, advantage 0, without an answer, outside the gate."""
        span = AnswerSpan(1, 2, 3, 4)
        known: dict[str, Any] = {
            "valid_B": torch.tensor([1, 1, 0, 1, 1, 1, 1]) > 0,
            "advantages_B": torch.tensor([-1.0, -1.0, 0.0, 0.0, 0.0, -1.0, 1.0]),
            "truncated_B": torch.tensor([0, 0, 0, 1, 0, 0, 0]) > 0,
            "non_finite_B": torch.tensor([0, 1, 0, 0, 0, 0, 0]) > 0,
            "spans": [span, span, None, None, span, None, span],
        }
        known |= changes
        mask_BT = known["valid_B"].unsqueeze(1)
        batch = RolloutBatch(mask_BT, known["advantages_B"], known.pop("spans"), {})
        return neutral_reasons(signal, signal.select(batch), **known)

    def test_of_each_kind(self) -> None:
        assert self._reasons(GrailConfig()) == [
            None,
            "non-finite scores",
            "no token trains",
            "truncated",
            "advantage 0",
            "no answer",
            "outside the gate",
        ]

    def test_of_other_settings_and_methods(self) -> None:
        """A truncated row that trains is a row as any; a method that needs no answer; and one that scores nothing."""
        advantages_B = torch.tensor([-1.0, -1.0, 0.0, -1.0, 0.0, -1.0, 1.0])
        assert self._reasons(GrailConfig(mask_truncated=False), advantages_B=advantages_B)[3] == "no answer"
        assert self._reasons(methods()["surprisal"].build({"statistics": "response"}))[5] is None
        assert self._reasons(methods()["uniform"].build({}))[0] == "not scored"


def test_size_estimate() -> None:
    assert size_estimate(64, 1000, 500) == (
        "token dump: 64 rows a step with up to 1000 tokens, at most about 1.28 MB a step and 0.64 GB for 500 steps"
    )


class _Queue:
    """TransferQueue as far as the dump asks it; remembers what it was asked."""

    def __init__(self, **without: bool) -> None:
        self.asked: list[tuple[list[str], list[str]]] = []
        self.without = without

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.asked.append((keys, select_fields))
        assert partition_id == "train"

        def jagged(of: dict[str, list[float]]) -> torch.Tensor:
            return torch.nested.as_nested_tensor([torch.tensor(of[key]) for key in keys], layout=torch.jagged)

        of_key = {"p_0_0": 0, "p_1_0": 1, "pad_0_0": 2}
        fields = {
            "rm_scores": jagged({"p_0_0": [0.0, 0.0, 1.0], "p_1_0": [0.0], "pad_0_0": [0.0]}),
            "old_log_probs": jagged({"p_0_0": [-0.5, -1.0, -1.5], "p_1_0": [-2.0], "pad_0_0": [0.0]}),
            "entropy": jagged({"p_0_0": [0.5, float("nan"), 1.5], "p_1_0": [2.0], "pad_0_0": [0.0]}),
        }
        plain = {
            "reward_model": [{"ground_truth": "a"}, {"ground_truth": 7}, {}],
            "extra_fields": [{"reward_extra_info": {"acc": 0.0}}, {}, {}],
            "data_source": ["gsm8k"] * 3,
            "extra_info": [{"index": 4}, {}, {}],
        }
        data = TensorDict(
            {name: values for name, values in fields.items() if not self.without.get(name)}, batch_size=len(keys)
        )
        for name, values in plain.items():
            if not self.without.get(name):
                tu.assign_non_tensor_stack(data, name, [values[of_key[key]] for key in keys])
        return data


def _trainer(folder: Path | None, **options: Any) -> TokenWeightTrainerSync:
    """A trainer that has what a dump needs of one."""
    trainer = TokenWeightTrainerSync.__new__(TokenWeightTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"temperature": 0.8, "n": 2}, "model": {"path": "/models/a"}},
            "data": {"train_batch_size": 4, "max_response_length": 100},
            "trainer": {"val_before_train": True},
            "algorithm": {"adv_estimator": "grail", "token_dump": {"folder": folder and str(folder), **options}},
        }
    )
    trainer.tokenizer = char_tokenizer()
    trainer.signal = GrailConfig(gate="all")
    trainer.global_steps, trainer.local_trigger_step, trainer.parameter_sync_step = 3, 0, 1
    trainer.total_training_steps = 10
    trainer.timing_raw = {}
    return trainer


def _start(trainer: TokenWeightTrainerSync) -> None:
    """As the trainer does it once its data are loaded."""
    if dump_options(trainer.config) is not None and trainer._dump is None:
        trainer._dump = UpdateDump(
            trainer.config,
            trainer.tokenizer,
            trainer.signal,
            updates=trainer.parameter_sync_step,
            steps=trainer.total_training_steps,
        )


def _dump(trainer: TokenWeightTrainerSync, advantage: float = -1.0) -> dict[str, float]:
    """Two rows of a prompt, and one that fills up the batch; returns the metrics."""
    responses = [torch.tensor(encode(text)) for text in ("{a}", "b", "b")]
    rollouts = SimpleNamespace(
        keys=["p_0_0", "p_1_0", "pad_0_0"],
        prompts=[torch.tensor(encode(text)) for text in ("what?", "what?", "?")],
        responses=responses,
        groups=[0, 0, 1],
    )
    spans = [AnswerSpan(0, 1, 2, 3), None, None]
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]) > 0
    base_BT = torch.tensor([[advantage], [0.0], [0.0]]) * mask_BT
    scores_BT = torch.tensor([[0.5, 0.25, float("inf")], [float("nan")] * 3, [float("nan")] * 3])
    weights_BT = torch.tensor([[0.5, 5.0, 1.0], [1.0, 0.0, 0.0], [0.0] * 3])
    batch = RolloutBatch(mask_BT, base_BT[:, 0], spans, {})
    truncated_B, rows = torch.tensor([False, True, False]), trainer.signal.select(batch)
    selection = Selection(batch, base_BT, base_BT, truncated_B, ~mask_BT[:, 0], rows)
    result = SimpleNamespace(weights_BT=weights_BT, non_finite_B=torch.zeros(3, dtype=torch.bool))
    meta = KVBatchMeta(partition_id="train", keys=rollouts.keys, tags=[{}, {}, {"is_padding": True}])
    _start(trainer)
    if trainer._dump is None:
        return {}
    trainer._dump.write(
        meta,
        rollouts,
        selection,
        scores_BT,
        result,
        base_BT * weights_BT,
        step=trainer.global_steps,
        update=trainer.local_trigger_step,
    )
    # What the run does to its tensors afterwards must not reach the file.
    for values in (scores_BT, weights_BT, base_BT):
        values.fill_(99.0)
    return {"token_dump/failed_files": trainer._dump.failed_files}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> _Queue:
    found = _Queue()
    monkeypatch.setattr(update_dump, "tq", found)
    return found


class TestTrainer:
    def _rows(self, trainer: TokenWeightTrainerSync, folder: Path) -> list[DumpRow]:
        trainer._dump.close()
        dump = read_dump(folder)
        rows = list(dump)
        assert dump.problems == []
        return rows

    def test_rows_are_the_runs_with_all_that_is_known_of_them(self, tmp_path: Path, queue: _Queue) -> None:
        trainer = _trainer(tmp_path)
        assert _dump(trainer) == {"token_dump/failed_files": 0}
        first, second = self._rows(trainer, tmp_path)
        assert queue.asked[0][0] == ["p_0_0", "p_1_0"], "nothing is fetched of rows that are not written"
        assert (first.key, first.row, first.group, first.step, first.update) == ("p_0_0", 0, 0, 3, 0)
        assert (first.prompt, first.response, first.answer, list(first.tokens)) == (
            "what?",
            "{a}",
            None,
            ["{", "a", "}"],
        )
        assert first.prompt_ids.tolist() == encode("what?") and first.token_ids_T.tolist() == encode("{a}")
        assert (first.gold, first.reward, first.outcome, first.id) == ("a", 1.0, "wrong", "gsm8k/4"), "acc goes first"
        assert (second.gold, second.reward, second.outcome, second.id) == ("7", 0.0, "wrong", None)
        assert (first.neutral, second.neutral) == (None, "truncated")
        assert (first.truncated, second.truncated) == (False, True)
        assert (first.span, second.span) == (AnswerSpan(0, 1, 2, 3), None)
        assert first.score_T[:2].tolist() == [0.5, 0.25] and first.score_T.size == 3 and second.score_T.size == 1
        assert first.weight_T.tolist() == [0.5, 5.0, 1.0] and first.base_advantage_T.tolist() == [-1.0] * 3
        assert first.advantage_T.tolist() == [-0.5, -5.0, -1.0]
        assert first.old_log_prob_T.tolist() == [-0.5, -1.0, -1.5] and second.old_log_prob_T.tolist() == [-2.0]
        assert first.entropy_T[[0, 2]].tolist() == [0.5, 1.5]

        header = read_dump(tmp_path).files[0].header
        assert (header.step, header.method, header.model, header.temperature) == (3, "grail", "/models/a", 0.8)
        assert (header.rows_in_step, header.special_tokens) == (2, {})
        assert header.options["gate"] == "all" and header.options["preset"] == "official"
        json.dumps(header.options, allow_nan=False)

    def test_what_a_run_does_not_have_is_left_out(self, tmp_path: Path, queue: _Queue) -> None:
        queue.without = dict.fromkeys(
            ("rm_scores", "entropy", "old_log_probs", "reward_model", "extra_fields", "extra_info"), True
        )
        trainer = _trainer(tmp_path)
        _dump(trainer)
        first, _ = self._rows(trainer, tmp_path)
        assert (first.gold, first.reward, first.outcome, first.id) == (None, None, None, None)
        assert first.entropy_T is None and first.old_log_prob_T is None

    def test_every_so_many_steps(self, tmp_path: Path, queue: _Queue) -> None:
        trainer = _trainer(tmp_path, every=2)
        for step in (3, 4, 5, 6):
            trainer.global_steps = step
            _dump(trainer)
        self._rows(trainer, tmp_path)
        assert read_dump(tmp_path).steps == [4, 6] and len(queue.asked) == 2

    def test_updates_share_the_rows_of_a_step_and_overwrite_nothing(self, tmp_path: Path, queue: _Queue) -> None:
        trainer = _trainer(tmp_path, rows=3)
        trainer.parameter_sync_step = 2
        for update, advantage in ((0, 1.0), (1, 2.0)):
            trainer.local_trigger_step = update
            _dump(trainer, advantage)
        rows = self._rows(trainer, tmp_path)
        assert [(row.update, row.base_advantage_T[0].item()) for row in rows] == [(0, 1.0), (1, 2.0)]

    def test_a_resumed_run_replaces_its_steps(self, tmp_path: Path, queue: _Queue) -> None:
        for step in (2, 3, 9):
            write_step(tmp_path, DumpHeader(step=step, method="grail"), [])
        _dump(_trainer(tmp_path, every=5))
        assert read_dump(tmp_path).steps == [2], "also the steps that this run does not write"

    def test_a_disk_that_fails_is_a_metric(self, tmp_path: Path, queue: _Queue) -> None:
        trainer = _trainer(tmp_path / "folder")
        _start(trainer)
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("no folder")
        _dump(trainer)
        trainer._dump.close()
        assert _dump(trainer)["token_dump/failed_files"] >= 1
        trainer._dump.close()

    def test_a_folder_that_cannot_be_made_is_refused_at_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(
            ValueError, match=r"algorithm\.token_dump\.folder=.*/file/below cannot be made .*choose another"
        ):
            _start(_trainer(tmp_path / "file/below"))

    def test_says_its_size_before_it_starts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _start(_trainer(tmp_path, every=3))
        assert capsys.readouterr().out == (
            "token dump: 8 rows a step with up to 100 tokens, at most about 0.016 MB a step and 4.8e-05 GB for 3 steps, "
            f"in {tmp_path}\n"
        )

    def test_whatever_ends_the_training_what_waits_is_written(
        self, tmp_path: Path, queue: _Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fit(self: Any, manager: str) -> None:
            assert manager == "agent loops"
            _dump(self)
            raise RuntimeError("the run failed")

        monkeypatch.setattr(PPOTrainerSync, "fit", fit)
        with pytest.raises(RuntimeError, match="the run failed"):
            _trainer(tmp_path).fit("agent loops")
        assert len(list(read_dump(tmp_path))) == 2

    def test_is_off_by_default(self, tmp_path: Path, queue: _Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        trainer = _trainer(None)
        _start(trainer)
        assert _dump(trainer) == {} and list(tmp_path.iterdir()) == [] and queue.asked == []
