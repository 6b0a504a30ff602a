"""No run resumes from another run's checkpoints or writes among its files, and a finished one says so."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import hydra
import psutil
import pytest
import verl  # noqa: F401  its plugin registers the estimators
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from verl.trainer.ppo.v1 import get_trainer_cls

from recipe.main_grail import prepare
from recipe.run_life.checkpoints import TRACKER, write_json
from recipe.run_life.identity import MAY_CHANGE, _flat, begin_run, hold_folders, run_definition
from recipe.run_life.identity import RUN_DEFINITION as FILE
from recipe.run_life.trainer import KeptRun
from tests import forked
from tests.checkpoints import write_checkpoint
from tests.composed import compose, parsed
from tests.run_life.killed_run import lives

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ANOTHER = r"the files of another run:(\n.*)+data\.seed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def _compose(folder: Path, *overrides: str) -> DictConfig:
    config = compose("grail_trainer", overrides)
    config.trainer.default_local_dir = str(folder)
    return config


def _start(folder: Path, *overrides: str) -> bool:
    """What an entry point does before Ray; whether anything is left to train."""
    return begin_run(prepare(_compose(folder, *overrides)))


def _save(folder: Path, step: int, **state: bool) -> Path:
    """A checkpoint of the configuration's eight ranks."""
    return write_checkpoint(folder, step, ranks=8, **state)


def _stored(folder: Path) -> dict:
    return json.loads((folder / FILE).read_text())


@pytest.fixture
def begun(folder: Path) -> Path:
    """The folder of a run with a checkpoint."""
    _start(folder)
    _save(folder, 10)
    return folder


def test_what_may_change(begun: Path) -> None:
    """Each pattern names options; beside them are sections that nobody reads, and options at their preset's value."""
    names = set(_flat(parsed(_compose(begun)).config)) | set(_flat(parsed(compose("cpu_trainer")).config))
    for pattern in " ".join(MAY_CHANGE.values()).split():
        assert fnmatch.filter(names, pattern), pattern
    for overrides in (
        ("trainer.total_training_steps=80", "trainer.save_freq=20", "trainer.test_freq=5"),
        ("trainer.logger=[console]", "trainer.experiment_name=other", "algorithm.token_dump.folder=/somewhere"),
        ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
        (f"{ROLLOUT}.gpu_memory_utilization=0.4", f"{ACTOR}.ppo_max_token_len_per_gpu=20000"),
        ("algorithm.token_weights.share_forward=false", f"{ACTOR}.fsdp_config.param_offload=True"),
        ("data.val_files=other.parquet", f"{ROLLOUT}.val_kwargs.n=1", "run_life.phase_timeout=60"),
        ("algorithm.oar.boost=3", "critic.optim.lr=1", "reward.reward_model.rollout.n=2", "algorithm.grail.span=first"),
    ):
        _start(begun, *overrides)


def test_everything_else_defines_a_run(begun: Path) -> None:
    for override, name, there, here in (
        ("data.seed=7", "data.seed", 42, 7),
        ("algorithm.grail.gate=all", "algorithm.grail.gate", "wrong", "all"),
        ("algorithm.grail.preset=robust", "algorithm.grail.alignment", "predictor", "token"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "grail", "grpo"),
        ("algorithm.token_weights.base=rloo", "algorithm.token_weights.base", "grpo", "rloo"),
        (f"{ACTOR}.optim.lr=2e-6", f"{ACTOR}.optim.lr", 1e-6, 2e-6),
        (f"{MODEL}.path=other/model", f"{MODEL}.path", "~/models/deepseek-llm-7b-chat", "other/model"),
        (f"+{MODEL}.override_config.dropout=0.1", f"{MODEL}.override_config.dropout", None, 0.1),
        ("data.dataloader_num_workers=2", "data.dataloader_num_workers", 8, 2),
        ("+data.apply_chat_template_kwargs.x=1", "data.apply_chat_template_kwargs.x", None, 1),
        ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode", "sync", "colocate_async"),
        ("trainer.balance_batch=False", "trainer.balance_batch", True, False),
    ):
        with pytest.raises(ValueError, match="choose another trainer") as refused:
            prepare(_compose(begun, override))
        assert f"  {name}: {there!r} there, {here!r} here\n" in str(refused.value)
    with pytest.raises(ValueError) as refused:
        prepare(_compose(begun, "data.seed=7", "algorithm.grail.gate=all", "trainer.total_training_steps=60"))
    named = {line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:-1]}
    seeds = {"data.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed", f"{ROLLOUT}.seed"}
    assert named == {"algorithm.grail.gate", *seeds}
    _start(begun, "data.seed=7", "run_life.strict=false")


def test_of_another_versions_definition_what_both_have_is_compared(begun: Path) -> None:
    """Earlier ones stored fewer options and no version."""
    here = _stored(begun)
    there = {name: value for name, value in here["definition"].items() if name.startswith(("data.s", f"{ACTOR}.optim"))}
    for by in ({}, {"by": {"verl": "0.8"}}):
        write_json(begun / FILE, {"run": "a run", "definition": {**there, "data.shelved": 3}, **by})
        with pytest.raises(ValueError, match=ANOTHER):
            prepare(_compose(begun, "data.seed=7"))
        _start(begun)
        assert _stored(begun) == {**here, "run": "a run"}


def test_a_folder_without_a_checkpoint_binds_nobody(folder: Path) -> None:
    _start(folder, "trainer.save_freq=-1")
    assert not folder.exists()
    _start(folder)
    _start(folder, "data.seed=7")
    assert _stored(folder)["definition"]["data.seed"] == 7


def test_from_the_start_or_a_named_checkpoint(begun: Path) -> None:
    """Two runs' checkpoints in one folder would be told apart by nothing. A run keeps its id, and another has its own."""
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={begun / 'global_step_10'}")
    ids = [_stored(begun)["run"]]
    for how in (named, ("trainer.resume_mode=disable",)):
        _start(begun, *how)
        ids.append(_stored(begun)["run"])
        with pytest.raises(ValueError, match=ANOTHER):
            prepare(_compose(begun, *how, "data.seed=7"))
    assert ids[0] == ids[1] != ids[2]
    prepare(_compose(begun, "trainer.resume_mode=disable", "data.seed=7", "trainer.save_freq=-1"))
    _start(begun.with_name("elsewhere"), *named, "data.seed=7")
    (begun / FILE).unlink()
    with pytest.raises(ValueError, match=r"no run_definition\.json that can be read"):
        prepare(_compose(begun))
    _start(begun, *named)
    _start(begun)


def test_the_run_resumes_from_the_last_whole_one(begun: Path) -> None:
    """And verl with it, which reads its own tracker, whatever the run is for."""
    for override in ("trainer.save_freq=10", "trainer.save_freq=-1", "trainer.val_only=True"):
        (_save(begun, 20) / "actor/model_world_size_8_rank_3.pt").write_bytes(b"PK")
        _start(begun, override)
        assert (begun / TRACKER).read_text() == "10"


def test_a_dumps_folder_belongs_to_a_run(folder: Path, tmp_path: Path) -> None:
    """As that of the checkpoints does, with a checkpoint or before the first one; an empty one is nobody's."""
    dump, step = f"algorithm.token_dump.folder={tmp_path / 'tokens'}", tmp_path / "tokens" / "step_000001.parquet"
    step.parent.mkdir()
    step.write_bytes(b"")
    with pytest.raises(ValueError, match=r"another run:\n  no run_definition\.json that can be read"):
        prepare(_compose(folder, dump))
    step.unlink()
    _start(folder, dump, "data.seed=7")
    _start(folder, dump)
    step.write_bytes(b"")
    with pytest.raises(ValueError, match=r"token_dump\.folder=.*another run:(\n.*)+data\.seed: 42 there"):
        prepare(_compose(folder, dump, "data.seed=7"))
    _start(folder, dump)


def test_a_run_is_finished_unless_something_is_left_to_do(begun: Path) -> None:
    last = _save(begun, 50, logged=False)
    assert _start(begun)  # its last step is not logged
    _save(begun, 50)
    assert not _start(begun)
    for epochs in (1000, 2000):  # how many steps they make, the checkpoint says
        assert _start(begun, "trainer.total_training_steps=null", f"trainer.total_epochs={epochs}") == (epochs == 2000)
    for left in ("total_training_steps=60", "val_only=True"):
        assert _start(begun, f"trainer.{left}")
    last.rename(begun / "global_step_45")  # verl's tracker still names it
    assert _start(begun)


def test_both_entry_points_define_a_run_alike(folder: Path) -> None:
    """verl's own command has no sections of methods, so what is left out there is the preset's."""
    ours = run_definition(parsed(_compose(folder, "algorithm.grail.preset=robust")))
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose("ppo_trainer", ["algorithm.adv_estimator=grail", "+algorithm.grail.preset=robust"])
    stock = run_definition(parsed(composed))
    names = {name for name in ours if name.startswith("algorithm.grail.")}
    assert len(names) > 10 and {name: stock[name] for name in names} == {name: ours[name] for name in names}


def test_one_switch_chooses_the_trainer(folder: Path) -> None:
    kept, off, stock = "recipe.run_life.trainer", "run_life.enabled=false", "algorithm.adv_estimator=grpo"
    for overrides, mode, module in (
        ((), "grail_kept_sync", kept),
        ((stock,), "kept_sync", kept),
        ((off,), "grail_sync", None),
        ((off, stock), "sync", None),
        (("algorithm.token_weights.trainer_module=json",), "grail_sync", "json"),
    ):
        config = _compose(folder, *overrides)
        prepare(config)
        assert config.trainer.v1.trainer_mode == mode and config.algorithm.token_weights.trainer_module == module
        assert module != kept or issubclass(get_trainer_cls(mode), KeptRun)


def _run_with_children(folder: Path, dump: str, told: Connection) -> None:
    hold_folders(parsed(_compose(folder, dump)))
    child = subprocess.Popen(["sleep", "300"], close_fds=False).pid
    fork = os.fork()
    if fork == 0 and os.fork() == 0:
        told.send(os.getpid())  # a child's child
    elif fork:
        told.send((child, fork))
    time.sleep(300)


@pytest.mark.slow
def test_a_folder_is_that_of_one_run_while_it_lives(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """A process that is killed leaves no lock, whatever becomes of its children; a dry run takes and minds none."""
    dump = f"algorithm.token_dump.folder={tmp_path / 'tokens'}"
    told, telling = forked.FORKS.Pipe(duplex=False)
    run = forked.fork(_run_with_children, folder, dump, telling)
    said = (told.recv(), told.recv())
    children = [psutil.Process(pid) for each in said for pid in (each if isinstance(each, tuple) else (each,))]
    try:
        again = [f"trainer.default_local_dir={folder}", f"hydra.run.dir={tmp_path}"]
        second = forked.run("recipe.main_grail", *again)
        assert f"belongs to a run that lives (process {run.pid} on " in second.stderr and second.returncode == 1
        dry = forked.run("recipe.main_grail", *again, DRY_RUN="1")
        assert dry.returncode == 0, dry.stderr
        with pytest.raises(ValueError, match=r"algorithm\.token_dump\.folder=.* belongs to a run that lives"):
            prepare(_compose(tmp_path / "another", dump, "trainer.save_freq=-1"), starts=True)
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        assert len(children) == 3 and all(map(lives, children))
        prepare(_compose(folder, dump), starts=True)
        (tmp_path / "file").write_text("")
        prepare(_compose(tmp_path / "file" / "checkpoints"), starts=True)
        assert "WARNING: trainer.default_local_dir=" in capfd.readouterr().err
    finally:
        for process in filter(lives, children):
            process.kill()
        run.kill()
