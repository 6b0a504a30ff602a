"""No run carries on from another run's checkpoints, and a finished one says so."""

from __future__ import annotations

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
from recipe.run_life.checkpoints import TRACKER
from recipe.run_life.identity import RUN_DEFINITION as FILE
from recipe.run_life.identity import begin_run, check_run, hold, run_definition
from recipe.run_life.trainer import KeptRun
from tests import forked
from tests.checkpoints import write_checkpoint
from tests.composed import compose, parsed
from tests.run_life.killed_run import lives

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model.path"


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


def _finished(folder: Path, *overrides: str) -> bool:
    return not begin_run(parsed(_compose(folder, *overrides)))


def _save(folder: Path, step: int, **state: bool) -> Path:
    """A checkpoint of the configuration's eight ranks."""
    return write_checkpoint(folder, step, ranks=8, **state)


def _definition(folder: Path) -> dict:
    return json.loads((folder / FILE).read_text())["definition"]


@pytest.fixture
def begun(folder: Path) -> Path:
    """The folder of a run with a checkpoint."""
    _start(folder)
    _save(folder, 10)
    return folder


MAY_CHANGE = {
    "steps": ("trainer.total_training_steps=80",),
    "records": ("trainer.logger=[console]", "trainer.experiment_name=other", "algorithm.token_dump.folder=/somewhere"),
    "devices": ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
    "another way to the same weights": ("algorithm.token_weights.share_forward=false",),
    "validation": ("data.val_files=other.parquet", f"{ROLLOUT}.val_kwargs.n=1"),
    "a section that nobody reads": ("algorithm.oar.boost=3", "algorithm.oar.variant=grail_port"),
    "an option at its preset's value": ("algorithm.grail.span=first",),
}


def test_what_may_change(begun: Path) -> None:
    for overrides in MAY_CHANGE.values():
        _start(begun, *overrides)


DEFINES = {
    "data.seed=7": ("data.seed", 42, 7),
    "algorithm.grail.gate=all": ("algorithm.grail.gate", "wrong", "all"),
    "algorithm.grail.preset=robust": ("algorithm.grail.alignment", "predictor", "token"),
    "algorithm.adv_estimator=grpo": ("algorithm.adv_estimator", "grail", "grpo"),
    f"{ACTOR}.optim.lr=2e-6": (f"{ACTOR}.optim.lr", 1e-6, 2e-6),
    "data.train_files=other.parquet": ("data.train_files", "~/data/rlhf/gsm8k/train.parquet", "other.parquet"),
    "trainer.v1.trainer_mode=colocate_async": ("trainer.v1.trainer_mode", "sync", "colocate_async"),
    f"{MODEL}=other/model": (MODEL, "~/models/deepseek-llm-7b-chat", "other/model"),
}  # fmt: skip


def test_another_run_is_refused_with_what_differs(begun: Path) -> None:
    for override, (name, there, here) in DEFINES.items():
        with pytest.raises(ValueError, match="choose another trainer") as refused:
            check_run(parsed(_compose(begun, override)))
        assert f"  {name}: {there!r} there, {here!r} here\n" in str(refused.value)
    with pytest.raises(ValueError) as refused:
        prepare(_compose(begun, "data.seed=7", "algorithm.grail.gate=all", "trainer.total_training_steps=60"))
    named = {line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:-1]}
    seeds = {"data.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed", f"{ROLLOUT}.seed"}
    assert named - {"reward.reward_model.rollout.seed"} == {"algorithm.grail.gate", *seeds}


def test_a_run_without_a_checkpoint_binds_nobody(folder: Path) -> None:
    _start(folder, "trainer.save_freq=-1")
    assert not folder.exists()
    _start(folder)
    _start(folder, "data.seed=7")
    assert _definition(folder)["data.seed"] == 7


ANOTHER = r"the files of another run:(\n.*)+data\.seed"


def test_from_the_start_or_a_named_checkpoint(begun: Path) -> None:
    """Two runs' checkpoints in one folder would be told apart by nothing."""
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={begun / 'global_step_10'}")
    for how in (("trainer.resume_mode=disable",), named):
        _start(begun, *how)
        with pytest.raises(ValueError, match=ANOTHER):
            prepare(_compose(begun, *how, "data.seed=7"))
    prepare(_compose(begun, "trainer.resume_mode=disable", "data.seed=7", "trainer.save_freq=-1"))
    elsewhere = begun.with_name("elsewhere")
    _start(elsewhere, *named, "data.seed=7")
    assert _definition(elsewhere)["data.seed"] == 7
    (begun / FILE).unlink()
    with pytest.raises(ValueError, match=r"no run_definition\.json that can be read"):
        prepare(_compose(begun))
    _start(begun, *named)
    _start(begun)


def test_the_run_carries_on_from_the_last_whole_one(begun: Path) -> None:
    """And verl with it, which reads its own tracker, whatever the run is for."""
    for override in ("trainer.save_freq=10", "trainer.save_freq=-1", "trainer.val_only=True"):
        (_save(begun, 20) / "actor/model_world_size_8_rank_3.pt").write_bytes(b"PK")
        _start(begun, override)
        assert (begun / TRACKER).read_text() == "10"


def test_a_dumps_folder_belongs_to_a_run(folder: Path, tmp_path: Path) -> None:
    """As that of the checkpoints does, with a checkpoint or before the first one; an empty one is nobody's."""
    dump = f"algorithm.token_dump.folder={tmp_path / 'tokens'}"
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "step_000001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"another run:\n  no run_definition\.json that can be read"):
        prepare(_compose(folder, dump))
    (tmp_path / "tokens" / "step_000001.parquet").unlink()
    _start(folder, dump, "data.seed=7")
    _start(folder, dump)
    assert _definition(tmp_path / "tokens")["data.seed"] == 42
    (tmp_path / "tokens" / "step_000001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"token_dump\.folder=.*another run:(\n.*)+data\.seed: 42 there"):
        prepare(_compose(folder, dump, "data.seed=7"))
    _start(folder, dump)


def test_a_run_is_finished_unless_something_is_left_to_do(begun: Path) -> None:
    last = _save(begun, 50, logged=False)
    assert not _finished(begun)  # its last step is not logged
    _save(begun, 50)
    assert _finished(begun) and not _start(begun)
    for left in ("total_training_steps=60", "val_only=True", "resume_mode=disable"):
        assert not _finished(begun, f"trainer.{left}")
    for epochs in (1000, 2000):  # how many steps they make, the checkpoint says
        overrides = ("trainer.total_training_steps=null", f"trainer.total_epochs={epochs}")
        assert _finished(begun, *overrides) == (epochs == 1000)
    last.rename(begun / "global_step_45")  # verl's tracker still names it
    assert not _finished(begun)


def test_both_entry_points_define_a_run_alike(folder: Path) -> None:
    """verl's own command has no sections of methods, so what is left out there is the preset's."""
    ours = run_definition(parsed(_compose(folder, "algorithm.grail.preset=robust")))
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose("ppo_trainer", ["algorithm.adv_estimator=grail", "+algorithm.grail.preset=robust"])
    stock = run_definition(parsed(composed))
    names = {name for name in ours if name.startswith("algorithm.grail.")}
    assert len(names) > 10
    assert {name: stock[name] for name in names} == {name: ours[name] for name in names}
    assert not [name for name in ours if name.startswith(("algorithm.oar", "algorithm.shear"))]


def test_a_run_keeps_its_id_and_another_has_its_own(begun: Path) -> None:
    ids = [json.loads((begun / FILE).read_text())["run"]]
    for override in ((), ("trainer.resume_mode=disable",)):
        _start(begun, *override)
        ids.append(json.loads((begun / FILE).read_text())["run"])
    assert ids[0] == ids[1] != ids[2]


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
    hold(parsed(_compose(folder, dump)))
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
        words = rf"trainer.default_local_dir={folder} belongs to a run that lives (process {run.pid} on "
        assert second.returncode == 1 and words in second.stderr and "Ray" not in second.stderr
        assert "EXPERIMENT_NAME" in second.stderr and "OUTPUT_DIR" in second.stderr
        dry = forked.run("recipe.main_grail", *again, DRY_RUN="1")
        assert dry.returncode == 0, dry.stderr
        with pytest.raises(ValueError, match=r"algorithm\.token_dump\.folder=.* belongs to a run that lives"):
            prepare(_compose(tmp_path / "another", dump, "trainer.save_freq=-1"), starts=True)
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        assert len(children) == 3 and all(map(lives, children))
        prepare(_compose(folder, dump), starts=True)
        (tmp_path / "file").write_text("")
        capfd.readouterr()
        prepare(_compose(tmp_path / "file" / "checkpoints"), starts=True)
        assert "WARNING: trainer.default_local_dir=" in capfd.readouterr().err
    finally:
        for process in filter(lives, children):
            process.kill()
        run.kill()
