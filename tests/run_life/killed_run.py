"""A whole verl run in the background, whose engine is killed: which processes are there, and which are left."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.verl_ext import whole_run

STARTED_IN = 1800.0
"""Seconds within which a run gets somewhere. Beside other tests, on a machine just started, its start alone once took 540."""


@dataclass
class KilledRun:
    """A run of a tiny model in a folder of its own.

    Args:
        folder: an empty one, or that of a run that is to resume.
        overrides: further options.
        environment: further variables.
        rows: prompts in the data set.
    """

    folder: Path
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    rows: int = 8

    def __post_init__(self) -> None:
        self.result: subprocess.CompletedProcess[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def options(self) -> list[str]:
        """What the run is about."""
        return [
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

    def _run(self) -> None:
        self.result = whole_run.start(self.folder, self.options, rows=self.rows, **self.environment)

    @property
    def driver(self) -> int:
        """The driver's process id, once it is there."""
        mark = f"hydra.run.dir={self.folder / 'hydra'}"
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if mark in words and "-m" in words[:3]:
                return process.pid
        raise LookupError(f"no driver of {self.folder}")

    def await_step(self, step: int) -> None:
        """Wait until a step is logged; then the run's processes are known: the driver and those below it."""
        self._await(lambda: _logged(self.folder / "metrics.jsonl") >= step)
        self.root = psutil.Process(self.driver)
        self.everybody = {self.root, *self.root.children(recursive=True)}

    def _await(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STARTED_IN
        while not there():
            assert self._thread.is_alive(), f"the run has ended\n{self._said()}"
            assert time.monotonic() < deadline, f"nothing came within {STARTED_IN:.0f} s\n{self._said()}"
            time.sleep(0.2)

    def _said(self) -> str:
        return "\n".join((self.folder / name).read_text()[-3000:] for name in whole_run.SAID)

    @property
    def engine(self) -> int:
        """The process id of a vLLM engine."""
        return next(process.pid for process in self.everybody if "VLLM::EngineCore" in title(process))

    def end(self, seconds: float) -> None:
        """Wait until the run has ended, and every process that was there is gone, with those that came below it since."""
        deadline = time.monotonic() + seconds
        while (left := [process for process in self.everybody if lives(process)]) or self._thread.is_alive():
            assert time.monotonic() < deadline, f"after {seconds:.0f} s are still there: {left}"
            for process in left:
                with contextlib.suppress(psutil.Error):
                    self.everybody |= set(process.children(recursive=True))
            time.sleep(1)

    def kill_all(self) -> None:
        """A test that failed ends the processes that it leaves."""
        with contextlib.suppress(LookupError):
            driver = psutil.Process(self.driver)
            self.everybody = {driver, *driver.children(recursive=True), *getattr(self, "everybody", ())}
        for process in getattr(self, "everybody", ()):
            with contextlib.suppress(psutil.Error):
                process.kill()


def lives(process: psutil.Process) -> bool:
    """Whether it is more than an exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def title(process: psutil.Process) -> str:
    """The words that a process calls itself by."""
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return ""


def _logged(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
