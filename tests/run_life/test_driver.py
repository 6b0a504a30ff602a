"""However a run ends, nothing of it is left: real processes and a real Ray, without verl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.run_life import endings, ray_life, reaper

ROOT = Path(__file__).parents[2]
BOUND = 60.0
"""Seconds within which everything is to be gone."""
STARTED_IN = 300.0
"""Seconds within which a run starts, beside four others and whatever else the machine does."""


def _await(there: Callable[[], bool], what: str, seconds: float = BOUND) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def sleepers() -> Iterator[Callable[[str], int]]:
    """Processes that carry a tag."""
    started: list[subprocess.Popen] = []

    def start(tag: str) -> int:
        started.append(subprocess.Popen(["sleep", "100"], env={reaper.VARIABLE: tag, "PATH": os.environ["PATH"]}))
        pid = started[-1].pid
        _await(lambda: pid in reaper.processes(tag), "the process has no environment")
        return pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def _of_a_driver_that_is_gone() -> tuple[int, str]:
    driver = subprocess.Popen(["sleep", "100"])
    tag = reaper.tag_of(driver.pid)
    driver.kill()
    driver.wait()
    return driver.pid, tag


class TestLeftovers:
    def test_of_a_dead_run_are_named_and_left_alone(
        self, sleepers: Callable[[str], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(endings, "LEFTOVER_SECONDS", 0.0)
        driver, tag = _of_a_driver_that_is_gone()
        pids = sorted([sleepers(tag), sleepers(tag)])
        assert [process.pid for process in reaper.leftovers()[driver]] == pids
        endings.name_leftovers()
        said = capsys.readouterr().err
        assert f"of a run that has ended (driver {driver}) these processes are still there" in said
        assert f"kill -9 {pids[0]} {pids[1]}" in said and "sleep 100" in said
        assert all(reaper.start_time(pid) is not None for pid in pids)

    def test_of_a_live_run_are_none(self, sleepers: Callable[[str], int]) -> None:
        sleepers(reaper.tag_of(os.getpid()))
        assert os.getpid() not in reaper.leftovers()

    def test_another_process_with_the_drivers_number_is_not_the_driver(self, sleepers: Callable[[str], int]) -> None:
        mine = reaper.tag_of(os.getpid())
        earlier = f"{mine.rpartition('/')[0]}/{reaper.start_time(os.getpid()) - 1}"
        pid = sleepers(earlier)
        assert [process.pid for process in reaper.leftovers()[os.getpid()]] == [pid]

    def test_of_another_machine_are_not_judged(self, sleepers: Callable[[str], int]) -> None:
        driver, tag = _of_a_driver_that_is_gone()
        sleepers(f"elsewhere{tag}")
        assert driver not in reaper.leftovers()


def _reaper(driver: int, tag: str, owner: str = "") -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", reaper.__file__, str(driver), str(reaper.start_time(driver)), tag, owner]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class TestReaper:
    def test_ends_what_carries_the_tag_and_nothing_else(
        self, sleepers: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reaper, "GRACE", 0.0)
        _, tag = _of_a_driver_that_is_gone()
        theirs, others = sleepers(tag), sleepers(reaper.tag_of(os.getpid()))
        assert reaper.await_none(tag, 10.0, act=reaper.kill) == []
        assert reaper.start_time(theirs) is None and reaper.start_time(others) is not None

    def test_ends_with_a_driver_that_leaves_nothing(self) -> None:
        driver = subprocess.Popen(["sleep", "100"])
        beside = _reaper(driver.pid, reaper.tag_of(driver.pid))
        driver.kill()
        driver.wait()
        _, said = beside.communicate(timeout=BOUND)
        assert beside.returncode == 0 and "was killed or crashed" in said

    def test_ends_what_is_left_though_nobody_listens(self, sleepers: Callable[[str], int]) -> None:
        driver = subprocess.Popen(["sleep", "100"])
        tag = reaper.tag_of(driver.pid)
        beside, left = _reaper(driver.pid, tag), sleepers(tag)
        beside.stderr.close()
        driver.kill()
        driver.wait()
        beside.wait(timeout=BOUND)
        assert reaper.start_time(left) is None

    def test_ends_the_driver_with_its_owner(self) -> None:
        driver, owner = subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sleep", "100"])
        beside = _reaper(driver.pid, reaper.tag_of(driver.pid), str(owner.pid))
        time.sleep(1.0)
        assert driver.poll() is None
        owner.kill()
        owner.wait()
        assert driver.wait(timeout=BOUND) == -signal.SIGTERM
        assert f"process {owner.pid}, which this run ends with, is gone" in beside.communicate(timeout=BOUND)[1]


class TestServers:
    """Ray's own servers; that their death ends a run is recorded in docs/endings.md."""

    CONFIG = OmegaConf.create({"trainer": {"resume_mode": "disable"}})

    @pytest.fixture
    def servers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, subprocess.Popen]:
        """Processes that Ray is made to take for the servers of this one, with logs."""
        started = {name: subprocess.Popen(["sleep", "100"]) for name in ("log_monitor", "raylet", "gcs_server")}
        dead = lambda: [(name, process) for name, process in started.items() if process.poll() is not None]  # noqa: E731
        node = SimpleNamespace(dead_processes=dead, node_ip_address="10.0.0.1", get_logs_dir_path=lambda: str(tmp_path))
        (tmp_path / "raylet.out").write_text("[state-dump] 1\nits last line\n[state-dump] 2\n")
        (tmp_path / "worker-1-2.out").write_text("a worker's\n")
        monkeypatch.setattr(ray_life.worker.global_worker, "node", node, raising=False)
        monkeypatch.setattr(ray_life.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
        monkeypatch.setattr(ray_life.ray, "is_initialized", lambda: True)
        yield started
        for process in started.values():
            process.kill()
            process.wait()

    def test_that_died_are_named_with_their_last_lines(self, servers: dict[str, subprocess.Popen]) -> None:
        assert endings._of_servers(self.CONFIG) is None
        for name in ("log_monitor", "raylet"):
            servers[name].kill()
            servers[name].wait()
        said = endings._of_servers(self.CONFIG)
        assert f"died       Ray's raylet, process {servers['raylet'].pid} on 10.0.0.1" in said
        assert "killed by SIGKILL" in said and "| its last line" in said and "the same command starts" in said
        assert "state-dump" not in said and "log_monitor" not in said and "gcs_server" not in said

    def test_while_ray_shuts_down_are_none(
        self, servers: dict[str, subprocess.Popen], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ray says that it has left before it ends them."""
        servers["gcs_server"].terminate()
        servers["gcs_server"].wait()
        assert "process" in endings._of_servers(self.CONFIG)
        answers = iter([True, False])
        monkeypatch.setattr(ray_life.ray, "is_initialized", lambda: next(answers))
        assert ray_life.dead_servers() == []

    def test_of_a_cluster_that_was_there_are_known_by_their_node(
        self, servers: dict[str, subprocess.Popen], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alive = {"here": True, "elsewhere": False}
        address = {"NodeManagerAddress": "10.0.0.1"}
        nodes = lambda: [{"NodeID": name, "Alive": there, **address} for name, there in alive.items()]  # noqa: E731
        monkeypatch.setattr(ray_life.state, "nodes", nodes)
        assert ray_life.own_node_is_gone() == []
        alive["here"] = False
        (death,) = ray_life.own_node_is_gone()
        assert death.what == "Ray's raylet on 10.0.0.1"
        assert ray_life.last_lines(death.who, 5)[1] == ["its last line"]


class _Run:
    """A run of ``ending_run``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.verl_ext.ending_run", str(folder)]
        with (folder / "said").open("w") as output:
            # What a shell starts in the background, such as these tests, has Ctrl-C ignored, and so has what that starts.
            hears = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            self.driver = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=hears)
        self.tag = reaper.tag_of(self.driver.pid)

    def processes(self) -> dict[str, int]:
        """The ids of driver, trainer, worker and the worker's child, once they are there."""
        found = self.folder / "processes.json"
        _await(lambda: found.exists() or self.driver.poll() is not None, "the run did not start", STARTED_IN)
        return {**json.loads(found.read_text()), "driver": self.driver.pid}

    def close(self) -> None:
        self.driver.kill()
        self.driver.wait()
        for pid in reaper.processes(self.tag):
            reaper.kill(pid)


WATCHDOG = "watchdog: this run cannot go on"
ENDINGS = {
    "worker": ("worker", signal.SIGKILL, [1], [WATCHDOG, "Worker the_worker, process", "the worker's last line"]),
    "trainer": ("trainer", signal.SIGKILL, [1], [WATCHDOG, "TaskRunner, process", "the trainer's own process"]),
    "driver": ("driver", signal.SIGKILL, [-signal.SIGKILL], ["was killed or crashed"]),
    "SIGTERM": ("driver", signal.SIGTERM, [1], []),
    "Ctrl-C": ("driver", signal.SIGINT, None, []),
}
"""Who gets which signal, how the driver may end (``None``: not with 0), and what is said."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _Run]]:
    """A run for each ending, all at once."""
    started = {name: _Run(tmp_path_factory.mktemp("run")) for name in ENDINGS}
    yield started
    for run in started.values():
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_of_which_one_is_killed_says_who_and_leaves_nobody(runs: dict[str, _Run], name: str) -> None:
    victim, number, statuses, said = ENDINGS[name]
    run = runs[name]
    processes = run.processes()
    assert {processes[who] for who in ("trainer", "worker", "child")} <= set(reaper.processes(run.tag))
    os.kill(processes[victim], number)
    status = run.driver.wait(timeout=BOUND)
    assert status in statuses if statuses is not None else status != 0
    _await(lambda: not reaper.processes(run.tag), "something of the run is still there")
    assert all(reaper.start_time(pid) is None for pid in processes.values())
    text = (run.folder / "said").read_text()
    for words in said:
        assert words in text, text
