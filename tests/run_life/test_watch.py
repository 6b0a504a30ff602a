"""When the watch ends a run and when it does not; and real processes on Ray, without verl, of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError

from recipe.run_life import watch
from recipe.run_life.actors import Death, death_of
from recipe.run_life.watch import END, INTERVAL, STEP, Options, RunEnded, Watchdog
from tests.checkpoints import write_checkpoint
from tests.run_life.killed_run import lives

LIMITS = Options(phase_timeout=100, long_phase_timeout=1000)
KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerDict\n\tactor_id: ad5601000000\n"
    "\tpid: 12403\n\tname: abcWorkerDict_0:0\n\tnamespace: bc85\n\tip: 192.0.2.2\nThe actor is dead because its worker "
    "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
    "code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage. "
    "(2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
"""Ray 2.60's words."""
BOUND = 900.0
"""Seconds within which runs start and everything is gone, beside others and whatever else the machine does."""


def _killed() -> Death:
    error = ActorDiedError()
    error.error_msg = KILLED
    return death_of(error)


class Scene:
    """A run as the watch sees it, with time that passes as told."""

    def __init__(self, folder: Path) -> None:
        self.now, self.dead = 5000.0, list[Death]()
        trainer = {"default_local_dir": str(folder), "resume_mode": "auto"}
        config = OmegaConf.create({"trainer": trainer, "run_life": vars(LIMITS)})
        self.watch = Watchdog(config, lambda: self.dead, lambda: self.now)

    def look_for(self, seconds: float) -> str | None:
        """Look every few seconds; the first verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            verdict = self.watch.look()
            if verdict is not None:
                return verdict
        return None

    def into(self, step: int, phase: str) -> None:
        """Up to a phase of a step."""
        self.watch.enter(STEP, step)
        self.watch.enter(phase, step)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(watch, "last_lines", lambda death, count: (f"/logs/worker-{death.pid}.err", ["a last line"]))
    return Scene(tmp_path)


def test_a_phase_without_an_end_ends_the_run(scene: Scene) -> None:
    """Start, first step, validation and checkpoints may take longer; a machine's time of suspension does not count."""
    for step, phase in ((0, "start"), (40, "testing"), (41, "gen"), (42, "save_checkpoint")):
        scene.into(step, phase) if step > 40 else scene.watch.enter(phase, step)
        assert scene.look_for(LIMITS.long_phase_timeout) is None
    assert "run_life.long_phase_timeout=1000" in scene.look_for(2 * INTERVAL)
    scene.into(43, "update_actor")
    scene.now += 36_000
    assert scene.watch.look() is None and scene.look_for(LIMITS.phase_timeout - 50) is None
    verdict = scene.look_for(60)
    assert "step 43, phase update_actor" in verdict and "run_life.phase_timeout=100" in verdict


def test_a_death_is_named_with_its_cause(scene: Scene, tmp_path: Path) -> None:
    """And where the same command resumes; those that go after the training are meant to."""
    write_checkpoint(tmp_path, 5)
    scene.into(6, "gen")
    scene.watch.enter(END, 6)
    scene.dead = [_killed(), Death("vLLMHttpServer, process 11", "gone", 11, "192.0.2.1")]
    assert scene.look_for(60) is None
    scene.into(7, "gen")
    text = scene.look_for(60)
    cause = "its worker process has died. Worker exit type: SYSTEM_ERROR"
    named = ("WorkerDict abcWorkerDict_0:0, process 12403 on 192.0.2.2", cause, "step 7, phase gen", "process 11: gone")
    for part in (*named, "/logs/worker-12403.err", "a last line", str(tmp_path / "global_step_5")):
        assert part in text, text


def test_the_trainer_is_interrupted_and_its_error_explained(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lock, as verl's, and though Ctrl-C is ignored. An error that nobody's death explains stays."""
    monkeypatch.setattr(watch, "NOTICE_SECONDS", 0.0)
    with pytest.raises(OSError, match="full"), scene.watch.guard():
        raise OSError("the disk is full")
    scene.into(3, "old_log_prob")
    scene.dead = [_killed()]
    with pytest.raises(RunEnded, match=r"WorkerDict(.*\n)+.*step 3, phase old_log_prob"), scene.watch.guard():
        raise OSError("a rank does not answer")
    scene.into(3, "gen")
    monkeypatch.setattr(watch, "INTERVAL", 0.05)
    monkeypatch.setattr(watch.os, "_exit", lambda status: None)
    with pytest.raises(RunEnded, match="WorkerDict") as ended, scene.watch.guard():
        scene.watch.begin()
        threading.Event().wait(30)
    assert isinstance(ended.value.__cause__, KeyboardInterrupt)


def _await(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("worker", 1, ["watchdog: this run cannot go on", "Worker the_worker, process", "the worker's last line"]),
        ("driver", -signal.SIGKILL, []),
    ],
)
def test_a_run_of_which_one_is_killed_says_who_and_ends_what_is_its_own(
    tmp_path: Path, name: str, status: int, words: list[str]
) -> None:
    """A process of the user's has died before, and ended nothing."""
    command = [sys.executable, "-m", "tests.run_life.ending_run", str(tmp_path)]
    with (tmp_path / "said").open("w") as output:
        driver = psutil.Popen(command, cwd=Path(__file__).parents[2], stdout=output, stderr=subprocess.STDOUT)
    everybody = {driver}
    try:
        path = tmp_path / "processes.json"
        _await(lambda: path.exists() or driver.poll() is not None, "the run did not start")
        processes = {**json.loads(path.read_text()), "driver": driver.pid}
        everybody |= {*driver.children(recursive=True), *map(psutil.Process, processes.values())}
        os.kill(processes[name], signal.SIGKILL)
        assert driver.wait(timeout=BOUND) == status
        # Ray ends no children of a worker whose raylet was killed before.
        spared = {processes["upload"]} | ({processes["child"]} if name == "driver" else set())
        _await(lambda: not any(lives(each) for each in everybody if each.pid not in spared), f"not gone: {everybody}")
        assert lives(psutil.Process(processes["upload"]))
        text = (tmp_path / "said").read_text()
        assert all(part in text for part in words), text
    finally:
        for process in [each for each in everybody if lives(each)]:
            process.kill()
