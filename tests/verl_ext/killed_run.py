"""A whole verl run in the background, of which processes are killed: who is there, who ends it, and who is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recipe.run_life import reaper
from tests.verl_ext import whole_run

TITLES = {
    "engine": "VLLM::EngineCore",
    "server": "ray::CpuVLLMHttpServer",
    "actor worker": "ray::WorkerDict",
    "reward worker": "ray::RewardLoopWorker",
    "agent loop worker": "ray::AgentLoopWorker",
    "storage": "ray::SimpleStorageUnit",
    "trainer": "ray::TaskRunner",
    "raylet": "/raylet/raylet",
    "gcs": "gcs_server",
}
"""What processes of a run call themselves, by what they are."""
STARTED_IN = 1800.0
"""Seconds within which a run gets somewhere. Beside other tests, on a machine just started, its start alone once took 540."""


@dataclass
class KilledRun:
    """A run of a tiny model in a folder of its own.

    Args:
        folder: an empty one, or that of a run that is to go on.
        overrides: further options.
        wrapper: words in front of the command.
        environment: further variables.
    """

    folder: Path
    overrides: list[str] = field(default_factory=list)
    wrapper: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result: subprocess.CompletedProcess[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        overrides = [
            "algorithm.adv_estimator=grail",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_epochs=1000",
            "trainer.total_training_steps=1000",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=1",
            *self.overrides,
        ]
        self.result = whole_run.start(
            self.folder, overrides, rows=8, wrapper=self.wrapper, OMP_NUM_THREADS="1", **self.environment
        )

    @property
    def driver(self) -> int:
        """The driver's process id, once it is there."""
        mark = f"hydra.run.dir={self.folder / 'hydra'}"
        for entry in reaper.PROC.iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if mark in words and "-m" in words[:3]:
                    return int(entry.name)
        raise LookupError(f"no driver of {self.folder}")

    @property
    def reaper(self) -> int:
        """The process beside the driver."""
        return next(pid for pid in self.everybody if reaper.__file__ in reaper.describe(pid, None).title)

    @property
    def owner(self) -> int:
        """The process that started the driver."""
        return parents()[self.driver]

    def find(self, what: str) -> int:
        """The process id of one of :data:`TITLES`."""
        for pid in self.processes():
            if TITLES[what] in reaper.describe(pid).title:
                return pid
        raise LookupError(f"no {what} among {[reaper.describe(pid).title for pid in self.processes()]}")

    def processes(self) -> list[int]:
        """Every process of the run, but for the driver and the one beside it."""
        return reaper.processes(self.tag)

    def await_step(self, step: int) -> None:
        """Wait until a step is logged; then the ids of the run's processes are known."""
        self._await(lambda: _logged(self.folder / "metrics.jsonl") >= step)
        self.tag = reaper.tag_of(self.driver)
        self.everybody = {pid: reaper.start_time(pid) for pid in [*descendants(self.driver), self.driver]}

    def _await(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STARTED_IN
        while not there():
            assert self._thread.is_alive(), f"the run has ended\n{self._said()}"
            assert time.monotonic() < deadline, f"nothing came within {STARTED_IN:.0f} s\n{self._said()}"
            time.sleep(0.2)

    def _said(self) -> str:
        return "\n".join((self.folder / name).read_text()[-3000:] for name in whole_run.SAID)

    def end(self, seconds: float) -> tuple[float, float]:
        """Wait for the run's end: seconds until the driver is gone, and until every process is."""
        started, driver = time.monotonic(), list(self.everybody)[-1]
        gone_after = None
        while time.monotonic() - started < seconds:
            left = self.left()
            if gone_after is None and driver not in left:
                gone_after = time.monotonic() - started
            if not left and not self._thread.is_alive():
                return gone_after, time.monotonic() - started
            time.sleep(0.2)
        raise AssertionError(f"after {seconds:.0f} s are still there: {[reaper.describe(pid) for pid in self.left()]}")

    def left(self) -> list[int]:
        """Which of the processes that were there still are, and those that have come since."""
        known = [pid for pid, started in self.everybody.items() if reaper.start_time(pid) == started]
        return sorted({*known, *self.processes()})

    def kill_all(self) -> None:
        """What a test that failed leaves behind is nobody else's business."""
        with contextlib.suppress(LookupError):
            driver = self.driver
            tag, started = reaper.tag_of(driver), descendants(driver)
            for pid in [driver, *started, *reaper.processes(tag)]:
                reaper.kill(pid)
        for pid in self.left() if hasattr(self, "everybody") else ():
            reaper.kill(pid)


def parents() -> dict[int, int]:
    """The parent of every process."""
    found: dict[int, int] = {}
    for entry in reaper.PROC.iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    return found


def descendants(pid: int) -> list[int]:
    """Every process below another, found by parents, so that nothing depends on what a process says of itself."""
    known, found = parents(), [pid]
    for process in found:
        found += [child for child, parent in known.items() if parent == process]
    return found[1:]


def _logged(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def send(pid: int, name: str) -> None:
    """Send a signal by its name."""
    os.kill(pid, getattr(signal, name))
