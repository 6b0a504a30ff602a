"""No run resumes from another run's checkpoints or writes among its files, a finished one says so, and one history stays."""

import asyncio
import fnmatch
import json
import os
import signal
import subprocess
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking

from grail_advantage.locks import let_go
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.entry import prepare_run
from recipe import run_life
from recipe.run_life import MAY_CHANGE, RUN_DEFINITION, KeepLast, begin_run, contents
from recipe.run_life.seeds import SeededAgentLoopWorker
from recipe.run_life.trainer import KeptRun, lines_stay
from tests import forked
from tests.composed import compose, parsed, prepare
from tests.run_life.processes import lives

MAY_DIFFER = """
trainer.total_training_steps=80 trainer.save_freq=20 trainer.test_freq=5
trainer.logger=[console] trainer.experiment_name=other algorithm.token_dump.folder=/somewhere
trainer.nnodes=2 trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.rollout.val_kwargs.n=1
"""
"""Overrides of a later start, a line each."""
DEFINES = {
    "data.seed": (42, 7),
    "algorithm.grail.gate": ("wrong", "all"),
    "algorithm.grail.preset": ("official", "robust"),
    "algorithm.adv_estimator": ("grail", "grpo"),
    "actor_rollout_ref.actor.optim.lr": (1e-06, 2e-06),
    "actor_rollout_ref.model.path": ("~/models/deepseek-llm-7b-chat", "other/model"),
    "+actor_rollout_ref.model.override_config.dropout": (None, 0.1),
    "trainer.v1.trainer_mode": ("sync", "colocate_async"),
    "trainer.balance_batch": (True, False),
}
"""Options, with the value of the run that began and that of a later start."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def _compose(folder: Path, *overrides: str) -> DictConfig:
    """A run of the recipe in a folder, of which the checkpoints and the token dump are parts."""
    config = compose("grail_trainer", [f"run.folder={folder}", *overrides])
    (folder.parent / "data.parquet").touch()
    config.data.train_files = config.data.val_files = str(folder.parent / "data.parquet")
    return config


def start(folder: Path, *overrides: str) -> DictConfig:
    """What the command does before Ray, and the configuration; the run's folder is free afterwards."""
    config = _compose(folder, *overrides)
    try:
        begin_run(prepare(config), config)
    finally:
        let_go(Path(config.trainer.default_local_dir))
    return config


def _refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as refused:
        prepare(_compose(folder, *overrides))
    return str(refused.value)


def _save(folder: Path, step: int) -> Path:
    """A checkpoint as verl leaves it."""
    path = folder / "checkpoints" / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    for name in ("data.pt", "actor/model.pt"):
        (path / name).touch()
    (path.parent / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


@pytest.fixture
def begun(folder):
    """The folder of a run with a checkpoint."""
    start(folder)
    _save(folder, 10)
    return folder


def test_what_may_change(begun):
    """Each pattern names options."""
    names = set()
    for name in ("grail_trainer", "cpu_trainer"):
        names |= dict(run_life.options(parsed(compose(name)).config)).keys()
    assert all(fnmatch.filter(names, pattern) for pattern in MAY_CHANGE.split())
    for line in MAY_DIFFER.strip().splitlines():
        prepare(_compose(begun, *line.split()))


def test_everything_else_defines_a_run(begun):
    for option, (stored, value) in DEFINES.items():
        message = _refused(begun, f"{option}={value}")
        assert f"  {option.lstrip('+')}: {stored!r} there, {value!r} here\n" in message
    # Several that differ are all named, beside one that may.
    refused = _refused(
        begun, "data.seed=7", "algorithm.grail.gate=all", "trainer.total_training_steps=60"
    )
    named = {line.split(":")[0].strip() for line in refused.splitlines()[1:-1]}
    seeds = ("actor.data_loader_seed", "actor.fsdp_config.seed", "rollout.seed")
    assert named == {"algorithm.grail.gate", "data.seed"} | {
        f"actor_rollout_ref.{seed}" for seed in seeds
    }


def test_from_the_start_or_a_named_checkpoint(begun):
    """Two runs' checkpoints in one folder would be told apart by nothing."""
    mode = "trainer.resume_mode=resume_path"
    named = (mode, f"trainer.resume_from_path={begun}/checkpoints/global_step_10")
    for how in (named, ("trainer.resume_mode=disable",)):
        start(begun, *how)
        assert "data.seed" in _refused(begun, *how, "data.seed=7")
    start(begun.with_name("elsewhere"), *named, "data.seed=7")
    nowhere = "trainer.resume_from_path=/nowhere/global_step_1"
    assert "resume_from_path" in _refused(begun, mode, nowhere)
    # Without a definition a checkpoint that is named is resumed from, whatever its run; the start writes a new one.
    (begun / "checkpoints" / RUN_DEFINITION).unlink()
    assert RUN_DEFINITION in _refused(begun)
    start(begun, *named)
    start(begun)


FILES = {
    "data.parquet": "data.train_files",
    "reward.py": "reward.custom_reward_function.path",
    "tools.yaml": "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "model/weights.safetensors": "actor_rollout_ref.model.path",
}
"""Files that a run reads, with the options that name them, or their folder."""


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_was_written_anew_is_another_run_s(file, tmp_path):
    """Under the same name. A clone, its data and its model may move."""

    def overrides(clone):
        # The data are those beside the run, as for every run here.
        return [f"{FILES[name]}={clone / name.split('/')[0]}" for name in [*FILES][1:]]

    clone = tmp_path / "clone"
    (clone / "model").mkdir(parents=True)
    for name in FILES:
        (clone / name).write_text("first")
    start(clone / "run", *overrides(clone))
    _save(clone / "run", 10)
    moved = clone.rename(tmp_path / "moved")
    start(moved / "run", *overrides(moved))
    (moved / file).write_text("other")
    refused = _refused(moved / "run", *overrides(moved))
    assert f"  {FILES[file]} ({file.split('/')[0]}): another content" in refused


def test_each_of_two_files_of_one_name_is_compared(tmp_path):
    """As of two benchmarks, whose files are both called test.parquet."""
    files = [tmp_path / name / "test.parquet" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("first")
    config = _compose(tmp_path / "run")
    config.data.train_files = list(map(str, files))
    run = prepare(config)
    for file in files:
        digests = contents(run)
        file.write_text("other")
        assert contents(run) != digests


def test_a_definition_that_somebody_wrote_is_shown_escaped(begun):
    """It may hold anything."""
    path = begun / "checkpoints" / RUN_DEFINITION
    stored = json.loads(path.read_text())
    stored["definition"]["x\x1b[2J"] = "y\x1b[2J"
    path.write_text(json.dumps(stored))
    assert "\x1b" not in _refused(begun)
    for odd in ("{", "[]", "{}", '{"definition": []}', "[" * 99999):
        path.write_text(odd)
        assert RUN_DEFINITION in _refused(begun)
    # Nothing in it can be compared, and its name is none.
    stored.update(definition={}, by=1, run=["\x1b"], contents=[7])
    path.write_text(json.dumps(stored))
    start(begun)
    assert json.loads(path.read_text())["run"].isalnum()


def test_a_folder_is_only_moved_away_after_its_check(begun, monkeypatch):
    """By scripts/train_cpu.sh: FRESH=1 lets no other run resume."""
    monkeypatch.setenv("FRESH", "1")
    assert "data.seed" in _refused(begun, "data.seed=7")
    monkeypatch.setenv("DRY_RUN", "1")
    prepare(_compose(begun, "data.seed=7"))


def test_a_dumps_folder_belongs_to_a_run(folder):
    """As that of the checkpoints does; an empty one is nobody's."""
    start(folder, "data.seed=7")
    start(folder)
    (folder / "tokens/step_000001.parquet").touch()
    assert "token_dump.folder=" in _refused(folder, "data.seed=7")
    start(folder)


def test_a_run_is_finished_unless_something_is_left_to_do(begun):
    last = _save(begun, 50)
    with pytest.raises(SystemExit) as ended:
        start(begun)
    assert not ended.value.code
    for override in (
        "total_training_steps=60",
        "total_training_steps=null",
        "val_only=True",
    ):
        start(begun, f"trainer.{override}")
    # verl's tracker still names step 50.
    last.rename(last.with_name("global_step_45"))
    start(begun)
    # A full disk leaves the file empty.
    (last.parent / "latest_checkpointed_iteration.txt").write_text("")
    with pytest.raises(ValueError):
        start(begun)


def test_the_last_checkpoints_of_all_starts_stay(folder, monkeypatch):
    """With what others put beside verl's files, and steps that are to be written again."""
    monkeypatch.setattr(run_life, "STARTS", ["recipe.run_life"])
    folders = [_save(folder, step) for step in (2, 4, 6, 8, 100)]
    (folders[1] / "notes.txt").touch()
    # Of steps 2, 4, 6 and 8 two stay, and of 4 what is not verl's; 100 is later.
    for count, steps in ((None, {2, 4, 6, 8, 100}), (2, {4, 6, 8, 100})):
        keep = KeepLast(OmegaConf.create({"trainer": {"max_actor_ckpt_to_keep": count}}))
        keep.on_save(None, 8, str(folders[3]), async_save=False)
        assert (
            set(map(run_life._step, (folder / "checkpoints").glob("global_step_*")))
            == steps
        )
    assert [path.name for path in folders[1].rglob("*")] == ["notes.txt"]


def _run_with_children(folder: Path, connection: Connection):
    config = _compose(folder)
    begin_run(prepare(config), config)
    connection.send(subprocess.Popen(["sleep", "300"], close_fds=False).pid)
    time.sleep(300)


@pytest.mark.slow
def test_a_folder_is_that_of_one_run_while_it_lives(folder):
    """A process that is killed leaves no lock, whatever becomes of its children; a check takes none."""
    receiver, sender = forked.FORKS.Pipe(duplex=False)
    run = forked.fork(_run_with_children, folder, sender)
    child = psutil.Process(receiver.recv())
    try:
        prepare(_compose(folder))
        with pytest.raises(ValueError, match="belongs to a run that lives"):
            start(folder)
        # The child has inherited the lock's open file, and lives on.
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        assert lives(child)
        start(folder)
    finally:
        child.kill()
        run.kill()


def test_the_switch_is_the_module_of_verls_start(folder, monkeypatch):
    registry = dict(TRAINER_REGISTRY)
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY", registry)
    run_life.register_trainers()
    assert registry
    assert all(issubclass(trainer, KeptRun) for trainer in registry.values())
    assert all(
        issubclass(registry[name], trainer) for name, trainer in TRAINER_REGISTRY.items()
    )
    _save(folder, 10)
    config = _compose(folder)
    assert patches.STARTS == []
    # As in verl, whatever lies there.
    prepare_run(config)
    assert config.trainer.v1.trainer_mode == "grail_sync"


def test_metrics_are_one_history(tmp_path, monkeypatch):
    """Of verl's own logger: later lines, and a cut one, go when a run resumes before them."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    for resumed, first in ((0, 0), (2, 3), (3, 4)):
        with lines_stay(resumed):
            logger = Tracking("project", "experiment", ["file"])
            for step in range(first, 5):
                logger.log({"started": resumed}, step)
        with path.open("a") as file:
            # A kill cuts a line off.
            file.write('{"step": 7, "data": {"dr')
    lines = map(json.loads, path.read_text().splitlines()[:-1])
    # Steps 0, 1 and 2 are of the first start, 3 of the one that resumed after 2, 4 of the last.
    started = {line["step"]: line["data"]["started"] for line in lines}
    assert started == {0: 0, 1: 0, 2: 0, 3: 2, 4: 3}


@pytest.mark.parametrize(
    ("step", "only", "validates"), [(0, False, True), (3, False, False), (3, True, True)]
)
def test_the_first_start_alone_validates_before_training(step, only, validates):
    """But for a run that does nothing else; the configuration's own value is for every start."""
    seen = []

    class Base:
        config = OmegaConf.create({"trainer": {"val_before_train": True, "val_only": only}})
        global_steps = step
        watch = SimpleNamespace(guard=nullcontext)

        def fit(self):
            seen.append(self.config.trainer.val_before_train)

    class Kept(KeptRun, Base): ...

    Kept().fit()
    assert seen == [validates]


class _Batches:
    """verl's data loader and batches, with its random keys."""

    def _fetch_one_gen_batch(self) -> TensorDict:
        names = np.array(["a", "b", "c"], dtype=object)
        return tu.get_tensordict({"uid": names, "x": torch.arange(3)})

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch


class _Ordered(KeptRun, _Batches): ...


def test_keys_go_by_step_and_place_and_rows_by_keys():
    """However the responses arrived; a session's outputs by their numbers."""
    trainer = _Ordered()
    fetched = []
    for trainer.global_steps in (3, 3, 4):
        fetched += tu.get(trainer._fetch_one_gen_batch(), "uid")
    # Step 3 fetches twice, three prompts each.
    assert fetched[:6] == [f"000003-{place:05d}" for place in range(6)]
    assert fetched[6:] == [f"000004-{place:05d}" for place in range(3)]
    keys = [
        "000001-00002_0_0",
        "000001-00001_10_0",
        "000001-00001_2_10",
        "000001-00001_2_9",
    ]
    batch = KVBatchMeta(
        partition_id="train", keys=list(keys), tags=[{"row": i} for i in range(4)]
    )
    balanced = trainer._balance_batch(batch, {})
    # By numbers: session 2 is before 10, and its output 9 before 10.
    assert [tag["row"] for tag in balanced.tags] == [3, 2, 1, 0]
    assert balanced.keys == keys[::-1]


REQUEST = {
    "run": 0,
    "step": 1,
    "validate": False,
    "session_id": 0,
    "index": 5,
    "raw_prompt": [{"role": "user", "content": "1+1"}],
    "uid": "a",
}


def _seeds(monkeypatch, **changes) -> list[int]:
    """The seeds of a response's three turns, for each of which verl's loops send the same parameters."""
    values = {**REQUEST, **changes}
    parameters = {"temperature": 0.7}

    async def generate(*, sampling_params: dict) -> dict:
        return sampling_params

    async def conversation(self, sampling_params: dict, *_, **__) -> list[dict]:
        return [
            await self.llm_client.generate(sampling_params=sampling_params)
            for _ in range(3)
        ]

    monkeypatch.setattr(SeededAgentLoopWorker.__mro__[1], "_run_agent_loop", conversation)
    worker = SeededAgentLoopWorker.__new__(SeededAgentLoopWorker)
    seed = f"actor_rollout_ref.rollout.seed={values['run']}"
    worker.config = OmegaConf.from_dotlist([seed])
    worker.llm_client = client = SimpleNamespace(generate=generate)
    received = asyncio.run(worker._run_agent_loop(parameters, values, **values))
    # Both are the worker's own, shared by all responses.
    assert worker.llm_client is client
    assert parameters == {"temperature": 0.7}
    seeds = [sent.pop("seed") for sent in received]
    assert received == [parameters] * 3
    return seeds


def test_a_response_has_its_seed_by_run_step_kind_prompt_number_and_turn(monkeypatch):
    seeds = _seeds(monkeypatch)
    assert _seeds(monkeypatch, uid="b") == seeds, "whenever, and under whatever key"
    changes = {"run": 1, "step": 2, "validate": True, "session_id": 1, "index": 6}
    for name, value in {**changes, "raw_prompt": [{"content": "1+2"}]}.items():
        seeds += _seeds(monkeypatch, **{name: value})
    # Seven variants of three turns; verl hands vLLM a seed of 63 bits.
    assert len(set(seeds)) == len(seeds) == 21
    assert all(0 <= seed < 2**63 for seed in seeds)
