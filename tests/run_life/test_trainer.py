"""A trainer whose runs may be killed: which checkpoint counts when, what it hands on, and the order of its responses.

``_Trainer`` stands in for verl's loop: it calls what verl's calls, in its order.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from recipe.run_life.checkpoints import TRACKER, Checkpoint, checkpoints, write_json
from recipe.run_life.identity import RUN_DEFINITION
from recipe.run_life.trainer import KeptRun
from tests.checkpoints import RUN, write_checkpoint

EVERY = 2


class Killed(BaseException):
    """Nothing of the run happens after it."""


class _Loop:
    """verl's ``PPOTrainer``, as far as a step's order goes."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.total_training_steps = config.trainer.total_training_steps
        self.killed_at: tuple[str, int] | None = None
        self.drawn: dict[int, float] = {}
        self.logger = SimpleNamespace(logger={})

    def _at(self, place: str) -> None:
        if self.killed_at == (place, self.global_steps):
            raise Killed

    def _load_checkpoint(self) -> None:
        tracker = Path(self.config.trainer.default_local_dir) / TRACKER
        self.global_steps = int(tracker.read_text()) if tracker.exists() else 0

    def on_step_begin(self) -> None:
        pass

    on_sample_begin = on_sample_end = on_step_end = _validate = on_step_begin
    _compute_old_log_prob = _compute_ref_log_prob = _compute_advantage = _update_actor = on_step_begin

    def _save_checkpoint(self) -> None:
        write_checkpoint(Path(self.config.trainer.default_local_dir), self.global_steps, logged=False, tracked=False)
        self._at("checkpoint")
        (Path(self.config.trainer.default_local_dir) / TRACKER).write_text(str(self.global_steps))

    def fit(self) -> str:
        if self.config.trainer.val_before_train:
            self._log()
        while self.global_steps < self.total_training_steps:
            self.global_steps += 1
            self.on_step_begin()
            self.drawn[self.global_steps] = torch.rand(()).item() + np.random.rand() + random.random()
            self._at("step")
            if self.global_steps % EVERY == 0:
                self._save_checkpoint()
            self._at("validation")
            self._log()
        return "done"

    def _log(self) -> None:
        with (Path(self.config.trainer.default_local_dir).parent / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.global_steps}) + "\n")


class _Trainer(KeptRun, _Loop):
    pass


@pytest.fixture
def config(tmp_path: Path) -> Any:
    write_json(tmp_path / "checkpoints" / RUN_DEFINITION, {"run": RUN})
    return OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(tmp_path / "checkpoints"),
                "resume_mode": "auto",
                "resume_from_path": None,
                "total_training_steps": 6,
                "total_epochs": 1000,
                "max_actor_ckpt_to_keep": 2,
                "val_before_train": True,
                "logger": [],
                "project_name": "project",
                "experiment_name": "experiment",
                "v1": {"trainer_mode": "grail_sync"},
            }
        }
    )


def _life(config: Any, killed_at: tuple[str, int] | None = None) -> _Trainer:
    """The run, until it is killed or done."""
    trainer = _Trainer(OmegaConf.create(OmegaConf.to_container(config)))
    trainer.killed_at = killed_at
    trainer._load_checkpoint()
    with contextlib.suppress(Killed):
        trainer.fit()
    return trainer


def _counting(config: Any) -> list[int]:
    return [each.step for each in checkpoints(Path(config.trainer.default_local_dir)) if each.state is not None]


@pytest.mark.parametrize("place", ["checkpoint", "validation"])
def test_a_checkpoint_counts_once_its_step_is_logged(config: Any, place: str) -> None:
    _life(config, (place, 4))
    assert _counting(config) == [2]
    assert (Path(config.trainer.default_local_dir) / "global_step_4").is_dir()


def test_the_last_steps_too(config: Any) -> None:
    _life(config, ("step", 3))
    assert _life(config).config.trainer.val_before_train is False and config.trainer.val_before_train is True
    assert _counting(config) == [4, 6]
    state = Checkpoint(Path(config.trainer.default_local_dir) / "global_step_6").state
    assert (state["step"], state["last_step"], state["total_epochs"]) == (6, 6, 1000)


def test_the_generators_go_on(config: Any, tmp_path: Path) -> None:
    """What the trainer's process draws from the checkpoint on is what an uninterrupted run draws."""

    def seed(*seeds: int) -> None:
        for generator, number in zip((torch.manual_seed, np.random.seed, random.seed), seeds, strict=True):
            generator(number)

    write_json(tmp_path / "other" / "checkpoints" / RUN_DEFINITION, {"run": RUN})
    other = OmegaConf.merge(config, {"trainer": {"default_local_dir": str(tmp_path / "other" / "checkpoints")}})
    seed(1, 2, 3)
    whole = _life(config).drawn
    seed(1, 2, 3)
    first = _life(other, ("step", 5)).drawn
    seed(7, 7, 7)
    again = _life(other).drawn
    assert first == {step: whole[step] for step in range(1, 6)}
    assert again == {step: whole[step] for step in range(5, 7)}


class _Batches:
    """verl's data loader and batches, with its random keys."""

    global_steps = 0
    balanced: KVBatchMeta

    def __init__(self) -> None:
        pass

    def _fetch_one_gen_batch(self) -> TensorDict:
        return tu.get_tensordict({"uid": np.array(["a", "b", "c"], dtype=object), "x": torch.arange(3)})

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch


class _Ordered(KeptRun, _Batches):
    __init__ = _Batches.__init__


def test_prompts_have_keys_by_step_and_place() -> None:
    trainer = _Ordered()
    fetched = {}
    for step in (3, 3, 4):
        trainer.global_steps = step
        fetched.setdefault(step, []).extend(tu.get(trainer._fetch_one_gen_batch(), "uid"))
    assert fetched[3] == [f"000003-{place:05d}" for place in range(6)]
    assert fetched[4] == [f"000004-{place:05d}" for place in range(3)]


def test_rows_stand_in_the_order_of_their_keys() -> None:
    """However they arrived; a session's outputs by their numbers."""
    keys = ["000001-00002_0_0", "000001-00001_10_0", "000001-00001_2_10", "000001-00001_2_9"]
    batch = KVBatchMeta(partition_id="train", keys=list(keys), tags=[{"row": i} for i in range(4)])
    found = _Ordered()._balance_batch(batch, {})
    assert [tag["row"] for tag in found.tags] == [3, 2, 1, 0]
    assert found.keys == [keys[3], keys[2], keys[1], keys[0]]
