"""A run whose engine the kernel kills, and the same run that goes on from a checkpoint: bit for bit, and with one history."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from grail_advantage.view.dump.files import COLUMNS, read_dump
from recipe.run_life.checkpoints import STATE, TRACKER, checkpoints
from tests.run_life.killed_run import KilledRun
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import WholeRun

pytestmark = pytest.mark.slow

PROMPTS, ROLLOUTS, STEPS, KILLED_BEHIND = 4, 4, 4, 2
BOUND = 600.0
"""Seconds until the run is to have ended: two looks of the watch, and Ray's shutdown take less than a tenth of it."""
MANAGER = "recipe.run_life.seeds.SeededAgentLoopManager"
OF_THE_ENGINE = ("training/rollout_", "rollout_corr/")
"""Figures of vLLM's own log-probabilities, whose last bits depend on what else was in a batch."""
OF_THE_MACHINE = re.compile(r"timing|perf/")
"""Seconds and memory."""


@dataclass(frozen=True)
class Pair:
    """A run, and what it was before it was taken back and went on."""

    uninterrupted: Path
    killed: KilledRun
    engine: int
    server: int
    resumed: WholeRun


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A run whose engine is killed behind step 4; then everything behind the checkpoint of step 2 is as a kill in step 4
    leaves it, and the run goes on."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        "trainer.n_gpus_per_node=2",
        f"trainer.save_freq={KILLED_BEHIND}",
        "trainer.max_actor_ckpt_to_keep=100",
        f"trainer.test_freq={KILLED_BEHIND}",
        "trainer.val_before_train=True",
        "trainer.logger=[file,tensorboard]",
    ]
    variables = {"TENSORBOARD_DIR": str(folder / "tensorboard")}
    run = KilledRun(folder, overrides, rows=3 * PROMPTS, environment=variables)
    try:
        run.await_step(STEPS + 2)  # that of the validation before the training is logged, too
        engine = run.engine
        server = psutil.Process(engine).ppid()  # there is one for each of the two ranks
        psutil.Process(engine).kill()
        run.end(BOUND)
    finally:
        run.kill_all()
    uninterrupted = tmp_path_factory.mktemp("uninterrupted")
    for name in ("metrics.jsonl", "dump"):
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, uninterrupted / name)

    for checkpoint in checkpoints(folder / "checkpoints"):
        if checkpoint.step > KILLED_BEHIND:
            (checkpoint.path / STATE).unlink(missing_ok=True)
            (checkpoint.path / "data.pt").unlink(missing_ok=True)
    (folder / "checkpoints" / TRACKER).write_text(str(KILLED_BEHIND))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: STEPS + 1]) + '{"step": 5, "da')
    options = [*run.options, f"trainer.total_training_steps={STEPS}"]
    return Pair(uninterrupted, run, engine, server, whole_run.run(folder, options, rows=3 * PROMPTS, **variables))


def test_a_killed_engine_ends_the_run_which_names_it_and_leaves_no_process(pair: Pair) -> None:
    """As where memory runs short. That no process is left the fixture has waited for."""
    assert pair.killed.result.returncode == 1
    said = pair.killed.result.stderr
    message = said[said.index("grail_advantage watchdog: this run cannot go on and ends now.") :]
    assert f"vLLM's engine of CpuVLLMHttpServer, process {pair.server} on " in message
    assert f"(EngineCore pid={pair.engine})" in message or "engine core exited unexpectedly" in message, message
    assert "the same command resumes after step " in message and str(pair.resumed.folder / "checkpoints") in message


def _lines(folder: Path) -> list[dict]:
    """Of the validation before the training, and of the steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][: STEPS + 1]


def test_every_step_is_logged_once(pair: Pair) -> None:
    """The first validation too; what was logged up to the checkpoint is what the first life logged."""
    lines = _lines(pair.resumed.folder)
    assert (pair.resumed.folder / "metrics.jsonl").read_text().count("\n") == STEPS + 1
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


def test_dumps_are_the_same(pair: Pair) -> None:
    """Each token, score, weight and advantage of every row, in the same order, under the same key."""
    steps = list(range(1, STEPS + 1))
    dumps = [read_dump(folder / "dump") for folder in (pair.uninterrupted, pair.resumed.folder)]
    assert dumps[0].steps[:STEPS] == dumps[1].steps == steps
    rows = [list(dump.rows(steps)) for dump in dumps]
    assert [row.key for row in rows[0]] == [row.key for row in rows[1]]
    assert len({row.key for row in rows[0]}) == STEPS * PROMPTS * ROLLOUTS
    for there, here in zip(*rows, strict=True):
        np.testing.assert_array_equal(here.token_ids_T, there.token_ids_T)
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(here, f"{column}_T"), getattr(there, f"{column}_T"))
