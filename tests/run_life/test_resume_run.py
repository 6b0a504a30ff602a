"""A run that goes on from a checkpoint against the same run uninterrupted: bit for bit, and with one history."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from grail_advantage.token_dump import COLUMNS, read_dump
from recipe.run_life.checkpoints import STATE, TRACKER, checkpoints
from tests import forked
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import WholeRun

pytestmark = pytest.mark.slow

PROMPTS, ROLLOUTS, STEPS, KILLED_BEHIND = 4, 4, 4, 2
MANAGER = "recipe.run_life.seeds.SeededAgentLoopManager"
OF_THE_ENGINE = ("training/rollout_", "rollout_corr/")
"""Figures of vLLM's own log-probabilities, whose last bits depend on what else was in a batch."""
OF_THE_MACHINE = re.compile(r"timing|perf/")
"""Seconds and memory."""


@dataclass(frozen=True)
class Pair:
    """A run, and what it was before it was taken back and went on."""

    uninterrupted: Path
    resumed: WholeRun


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Four steps; then everything behind the checkpoint of step 2 is as a kill in step 4 leaves it, and the run goes on."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "algorithm.adv_estimator=grail",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=10",
        f"trainer.save_freq={KILLED_BEHIND}",
        f"trainer.test_freq={KILLED_BEHIND}",
        "trainer.val_before_train=True",
        "trainer.logger=[file,tensorboard]",
    ]
    settings = {
        "rows": 3 * PROMPTS,
        "python": forked.python(),
        "OMP_NUM_THREADS": "1",
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
    }
    whole_run.run(folder, overrides, **settings)
    uninterrupted = tmp_path_factory.mktemp("uninterrupted")
    for name in ("metrics.jsonl", "dump"):
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, uninterrupted / name)

    last = checkpoints(folder / "checkpoints")[-1].path
    (last / STATE).unlink()
    (last / "data.pt").unlink()
    (folder / "checkpoints" / TRACKER).write_text(str(KILLED_BEHIND))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "da')
    return Pair(uninterrupted, whole_run.run(folder, overrides, **settings))


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_logged_once(pair: Pair) -> None:
    """The first validation too; what was logged up to the checkpoint is what the first life logged."""
    lines = _lines(pair.resumed.folder)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert lines[: KILLED_BEHIND + 1] == _lines(pair.uninterrupted)[: KILLED_BEHIND + 1]
    assert lines[STEPS]["data"]["training/global_step"] == STEPS


def test_metrics_from_the_checkpoint_on_are_the_same_bit_for_bit(pair: Pair) -> None:
    resumed, uninterrupted = (_lines(folder) for folder in (pair.resumed.folder, pair.uninterrupted))
    for there, here in zip(uninterrupted[KILLED_BEHIND + 1 :], resumed[KILLED_BEHIND + 1 :], strict=True):
        assert there["data"].keys() == here["data"].keys()
        names = [
            name for name in there["data"] if not name.startswith(OF_THE_ENGINE) and not OF_THE_MACHINE.search(name)
        ]
        assert len(names) > 50
        assert {"actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "grail/weight_deviation"} <= {
            *names
        }
        assert {name: here["data"][name] for name in names} == {name: there["data"][name] for name in names}
    moved = [line["data"]["actor/grad_norm"] for line in resumed[1:]]
    assert len(set(moved)) > 1, "nothing was learned that could have been lost"


def test_the_engines_own_figures_differ_by_rounding_alone(pair: Pair) -> None:
    resumed, uninterrupted = (_lines(folder) for folder in (pair.resumed.folder, pair.uninterrupted))
    for there, here in zip(uninterrupted[KILLED_BEHIND + 1 :], resumed[KILLED_BEHIND + 1 :], strict=True):
        for name in (name for name in there["data"] if name.startswith(OF_THE_ENGINE)):
            assert here["data"][name] == pytest.approx(there["data"][name], abs=1e-4), name


def test_dumps_are_the_same(pair: Pair) -> None:
    """Each token, score, weight and advantage of every row, in the same order, under the same key."""
    dumps = [read_dump(folder / "dump") for folder in (pair.uninterrupted, pair.resumed.folder)]
    assert [dump.steps for dump in dumps] == [list(range(1, STEPS + 1))] * 2
    rows = [list(dump.rows()) for dump in dumps]
    assert [row.key for row in rows[0]] == [row.key for row in rows[1]]
    assert len({row.key for row in rows[0]}) == STEPS * PROMPTS * ROLLOUTS
    for there, here in zip(*rows, strict=True):
        np.testing.assert_array_equal(here.token_ids_T, there.token_ids_T)
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(here, f"{column}_T"), getattr(there, f"{column}_T"))


def test_tensorboard_shows_one_run(pair: Pair) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(pair.resumed.folder / "tensorboard"))
    found.Reload()
    events = found.Scalars("actor/grad_norm")
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    logged = [line["data"]["actor/grad_norm"] for line in _lines(pair.resumed.folder)[1:]]
    assert [event.value for event in events] == pytest.approx(logged, rel=1e-6)


def test_it_says_where_it_goes_on(pair: Pair) -> None:
    assert "setting global step to 2" in pair.resumed.output
    steps = [each.step for each in checkpoints(pair.resumed.folder / "checkpoints") if each.state is not None]
    assert steps == [KILLED_BEHIND, STEPS]
