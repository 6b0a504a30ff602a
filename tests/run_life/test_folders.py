"""One process writes to a folder, and what a run needs of the machine is there: each machine here once."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import verl  # noqa: F401  its plugin registers the estimators

from grail_advantage.dump import folder_lock
from grail_advantage.dump.folder_lock import LOCK, hold, let_go
from grail_advantage.verl_ext.entry import prepare_run
from recipe import checks, launch
from tests import forked
from tests.composed import compose

LIVES = "belongs to a run that lives"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that is locked as by another process: by another open file."""
    folder = tmp_path / "run"
    folder.mkdir()
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield folder
    os.close(lock)


def test_all_paths_of_a_folder_are_one_folder(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(foreign)
    monkeypatch.chdir(foreign)
    for path in (foreign, tmp_path / "link", Path(), Path("../link/../run")):
        with pytest.raises(ValueError, match=rf"^a={re.escape(str(foreign))} {LIVES} .*or choose b$"):
            hold(path, "choose b", "a")


def test_a_copy_and_what_a_dead_process_leaves_are_free(foreign: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(foreign, tmp_path / "copied")
    for _ in range(2):  # the second time it is this process's
        hold(copied, "")
    assert f"process {os.getpid()} on " in (copied / LOCK).read_text()
    moved = copied.rename(tmp_path / "moved")
    hold(copied, "")
    with (moved / LOCK).open() as lock, (copied / LOCK).open() as other:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    let_go(copied)
    hold(copied, "")
    let_go(copied)


def test_a_folder_that_is_moved_away_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking its file, by another start's FRESH=1."""
    folder, moved, flock = tmp_path / "run", tmp_path / "run.1", fcntl.flock

    def later(lock: int, how: int) -> None:
        if not moved.exists():
            folder.rename(moved)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", later)
    hold(folder, "")
    with (folder / LOCK).open() as lock, pytest.raises(BlockingIOError):
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    let_go(folder)


def test_without_locks_a_run_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_lock, "_warned", [])

    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    hold(tmp_path / "a", "")
    hold(tmp_path / "b", "")
    assert capsys.readouterr().err.count("No locks available") == 1


def test_verls_own_command_has_its_dump_to_itself(foreign: Path) -> None:
    config = compose(
        "verl_grail", [f"algorithm.token_dump.folder={foreign}", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    )
    config.actor_rollout_ref.rollout.n = 4
    with pytest.raises(ValueError, match=rf"^algorithm\.token_dump\.folder=.* {LIVES}"):
        prepare_run(config)


def _begin(folder: Path, fresh: bool, told: Connection, telling: Connection) -> None:
    try:
        told.recv()
        launch.make_room(folder, fresh=fresh)
        launch.take(folder, None)
        telling.send(os.getpid())
    except ValueError as error:
        telling.send(str(error))
    told.recv()


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_of_starts_at_once_one_begins(tmp_path: Path, fresh: bool) -> None:
    """And each folder of a run that lived is there, with what was in it."""
    folder = tmp_path / "run"
    for number in range(4):
        folder.mkdir(exist_ok=True)
        (folder / f"of {number}").touch()
        pipes = [(forked.FORKS.Pipe(duplex=False), forked.FORKS.Pipe(duplex=False)) for _ in range(4)]
        starts = [forked.fork(_begin, folder, fresh, told, telling) for (told, _), (_, telling) in pipes]
        try:
            for (_, go), _ in pipes:
                go.send(None)
            said = [hears.recv() for _, (hears, _) in pipes]
            begun = [each for each in said if isinstance(each, int)]
            assert len(begun) == 1 and all(LIVES in each for each in said if each not in begun), said
            assert (folder / LOCK).read_text().startswith(f"process {begun[0]} on ")
            assert sorted(path.name for path in tmp_path.glob("**/of *")) == [
                f"of {each}" for each in range(number + 1)
            ]
        finally:
            for start in starts:
                start.kill()
                start.join()


def _host(monkeypatch: pytest.MonkeyPatch, *, own_ray: bool = False, **variables: str | None) -> None:
    for name in (
        "RAY_ADDRESS",
        "RAY_TMPDIR",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_DATASETS_CACHE",
        "RAY_AUTH_MODE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/tmp", **variables}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    checks.check_host(own_ray=own_ray)


def test_machines_on_which_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        for variables in (
            {},
            {"HOME": str(tmp_path / "made later")},
            {"HOME": "/dev/null", "HF_HOME": str(tmp_path), "RAY_AUTH_TOKEN": "a"},
            {"TMPDIR": f"/tmp/{'n' * 60}", "RAY_TMPDIR": "/tmp"},
            {"TMPDIR": f"/tmp/{'n' * 60}", "RAY_ADDRESS": address},
            {"RAY_ADDRESS": f"ray://{address}"},
        ):
            _host(monkeypatch, **variables)
        _host(monkeypatch, own_ray=True, RAY_ADDRESS="127.0.0.1:1")


BAD = {
    "HOME=/dev/null/home": {},
    "TMPDIR=/dev/null": {},
    f"TMPDIR=/tmp/{'n' * 40}": {},
    f"TMPDIR=/tmp/{'ü' * 20}": {},
    f"TMPDIR=/tmp/{'n' * 70}": {"RAY_TMPDIR": "/tmp"},
    f"RAY_TMPDIR=/tmp/{'n' * 40}": {"TMPDIR": "/tmp"},
    "RAY_ADDRESS=127.0.0.1:1": {},
    "RAY_ADDRESS=head": {},
    "RAY_ADDRESS=[::1]:99999": {},
}


@pytest.mark.parametrize("variable", BAD)
def test_machines_on_which_none_starts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = variable.partition("=")
    with pytest.raises(ValueError, match=f"^{re.escape(variable)}: .*(set|unset) "):
        _host(monkeypatch, **{name: value}, **BAD[variable])


def test_the_socket_that_just_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own check, of its session's longest name."""
    from ray._private.utils import validate_socket_filepath

    fits = []
    for length in range(20, 60):
        folder = "/" + "n" * length
        path = f"{folder}/ray/session_2026-11-26_11-36-17_949273_{os.getpid()}/sockets/plasma_store"
        try:
            validate_socket_filepath(path)
            fits.append(True)
        except OSError:
            fits.append(False)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        try:
            checks.check_temporary()
        except ValueError as error:
            assert ("too long" in str(error)) != fits[-1]
        else:
            assert fits[-1]
    assert {True, False} == set(fits)


def test_little_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=64 << 20))
    _host(monkeypatch)
    assert "64 MiB" in capsys.readouterr().err


def test_a_refused_machine_has_nothing_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for knobs, wanted in (
        ({"HOME": "/dev/null"}, "^HOME="),
        ({"OUTPUT_DIR": "/dev/null"}, "OUTPUT_DIR"),
        ({"OUTPUT_DIR": f"{tmp_path}/a::b"}, "OUTPUT_DIR"),
        ({"OUTPUT_DIR": f"{tmp_path}/$HERE", "HERE": "there"}, "OUTPUT_DIR"),
        ({"OUTPUT_DIR": f"{tmp_path}/{'n' * 256}"}, "OUTPUT_DIR"),
    ):
        monkeypatch.setattr("sys.argv", ["recipe.launch", "--begin", "tiny_cpu"])
        monkeypatch.setattr(os, "environ", {"OUTPUT_DIR": str(tmp_path / "out"), **knobs})
        with pytest.raises(SystemExit, match=wanted):
            launch.main()
    assert not list(tmp_path.iterdir())


WITHOUT_FLOCK = """
import logging, os, random, sys, tempfile
from pathlib import Path
sys.modules["fcntl"] = None
del os.register_at_fork
from grail_advantage.dump.folder_lock import hold, let_go
for name in ("a", "b"):
    folder = Path(sys.argv[1], name)
    hold(folder, "choose another")
    let_go(folder)
    print(folder.is_dir())
"""


def test_a_system_without_flock_gets_a_warning(tmp_path: Path) -> None:
    """Windows."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_FLOCK, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n" and done.stderr.count("cannot be locked") == 1, done.stderr
