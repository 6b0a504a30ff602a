"""A run that is killed anywhere and resumes is the uninterrupted one: what it draws, what it logs, which checkpoints count.

``_Trainer`` stands in for verl's loop: it calls what verl's calls, in its order, and logs with verl's loggers.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.summary.writer import event_file_writer
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking

from recipe.run_life.checkpoints import PARTS, TRACKER, checkpoints, choose_start, damage, settle_start, write_json
from recipe.run_life.identity import RUN_DEFINITION
from recipe.run_life.trainer import KeptRun
from tests.checkpoints import RUN, write_checkpoint

EVERY, STEPS = 2, 6


class Killed(BaseException):
    """Nothing of the run happens after it."""


class _Loop:
    """verl's ``PPOTrainer``, as far as a step's order goes."""

    def __init__(self, config: Any) -> None:
        self.config, self.total_training_steps = config, STEPS
        self.killed_at: tuple[str, int] | None = None

    def _at(self, place: str) -> None:
        if self.killed_at == (place, self.global_steps):
            raise Killed

    def _load_checkpoint(self) -> None:
        tracker = self._folder / TRACKER
        self.global_steps = int(tracker.read_text()) if tracker.exists() else 0

    def on_step_begin(self) -> None:
        pass

    on_sample_begin = on_sample_end = on_step_end = _validate = on_step_begin
    _compute_old_log_prob = _compute_ref_log_prob = _compute_advantage = _update_actor = on_step_begin

    def _save_checkpoint(self) -> None:
        write_checkpoint(self._folder, self.global_steps, logged=False, tracked=False)
        self._at("saving")
        (self._folder / TRACKER).write_text(str(self.global_steps))

    def fit(self) -> None:
        self.logger = Tracking("project", "experiment", ["file", "tensorboard"])
        self.logger._finished = True  # its __del__ is not what ends a killed run
        if self.config.trainer.val_before_train:
            self.logger.log({"drawn": 0.0}, 0)
        while self.global_steps < STEPS:
            self.global_steps += 1
            self.on_step_begin()
            drawn = torch.rand(()).item() + np.random.rand() + random.random()
            self._at("step")
            if self.global_steps % EVERY == 0:
                self._save_checkpoint()
            self._at("saved")
            self.logger.log({"drawn": drawn}, self.global_steps)
            self._at("logged")
        self.logger.logger["tensorboard"].writer.flush()


class _Trainer(KeptRun, _Loop):
    pass


def _life(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, killed_at: tuple[str, int] | None = None) -> int:
    """A start of the run, until it is killed or done. Returns the step after which it resumed."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "tensorboard"))
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(seed)
    settings = {"default_local_dir": str(folder / "checkpoints"), "resume_mode": "auto", "logger": ["tensorboard"]}
    settings |= {"total_epochs": 1000, "max_actor_ckpt_to_keep": 2, "val_before_train": True, "v1": {}}
    settings |= {"project_name": "project", "experiment_name": "experiment"}
    trainer = _Trainer(OmegaConf.create({"trainer": settings}))
    start, _ = choose_start(folder / "checkpoints", lambda path: damage(path, list(PARTS)))
    settle_start(folder / "checkpoints", start, trains=True)
    trainer.killed_at = killed_at
    trainer._load_checkpoint()
    resumed = trainer.global_steps
    with contextlib.suppress(Killed):
        trainer.fit()
    return resumed


def _history(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    states = [each.state for each in checkpoints(folder / "checkpoints")]
    return {
        "file": [(line["step"], line["data"]["drawn"]) for line in lines],
        "tensorboard": [(event.step, event.value) for event in events.Scalars("drawn")],
        "counting": [(state["step"], state["last_step"], state["total_epochs"]) for state in states if state],
    }


@pytest.fixture
def uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    # Event files of one second and process are read in the order of this number's digits.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
    write_json(tmp_path / "whole" / "checkpoints" / RUN_DEFINITION, {"run": RUN})
    assert _life(tmp_path / "whole", 1, monkeypatch) == 0
    return _history(tmp_path / "whole")


@pytest.mark.parametrize(
    ("killed_at", "resumes"),
    [
        (("step", 1), 0),
        (("step", 3), 2),
        (("saving", 4), 2),
        (("saved", 4), 2),
        (("logged", 4), 2),  # the checkpoint counts from the next step on
        (("step", 5), 4),
        (("step", 6), 4),
    ],
)
def test_killed_and_resumed(
    uninterrupted: dict[str, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: tuple, resumes: int
) -> None:
    folder = tmp_path / "killed"
    write_json(folder / "checkpoints" / RUN_DEFINITION, {"run": RUN})
    _life(folder, 1, monkeypatch, killed_at)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "data": {"dr')
    assert _life(folder, 7 if resumes else 1, monkeypatch) == resumes
    assert _history(folder) == uninterrupted
    assert uninterrupted["counting"] == [(4, 6, 1000), (6, 6, 1000)]
    assert [step for step, _ in uninterrupted["file"]] == list(range(STEPS + 1))


class _Batches:
    """verl's data loader and batches, with its random keys."""

    def __init__(self) -> None:
        pass

    def _fetch_one_gen_batch(self) -> TensorDict:
        return tu.get_tensordict({"uid": np.array(["a", "b", "c"], dtype=object), "x": torch.arange(3)})

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch


class _Ordered(KeptRun, _Batches):
    __init__ = _Batches.__init__


def test_keys_go_by_step_and_place_and_rows_by_keys() -> None:
    """However the responses arrived; a session's outputs by their numbers."""
    trainer = _Ordered()
    fetched: dict[int, list[str]] = {}
    for trainer.global_steps in (3, 3, 4):
        fetched.setdefault(trainer.global_steps, []).extend(tu.get(trainer._fetch_one_gen_batch(), "uid"))
    assert fetched[3] == [f"000003-{place:05d}" for place in range(6)]
    assert fetched[4] == [f"000004-{place:05d}" for place in range(3)]
    keys = ["000001-00002_0_0", "000001-00001_10_0", "000001-00001_2_10", "000001-00001_2_9"]
    batch = KVBatchMeta(partition_id="train", keys=list(keys), tags=[{"row": i} for i in range(4)])
    found = trainer._balance_batch(batch, {})
    assert [tag["row"] for tag in found.tags] == [3, 2, 1, 0] and found.keys == keys[::-1]
