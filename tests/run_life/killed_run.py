"""A whole verl run in the background, whose engine is killed: which processes are there, and which are left."""

import contextlib
import subprocess
import threading
import time
from pathlib import Path

import psutil

from tests.verl_ext import whole_run

STARTED_IN = 1800.0
"""Seconds within which a run gets somewhere. Beside other tests, on a machine just started, its start alone once took 540."""


class KilledRun:
    """A run of a tiny model in an empty folder; with further options and variables, and so many prompts in the data set."""

    def __init__(
        self, folder: Path, overrides: list[str], *, rows: int, environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self.everybody = set[psutil.Process]()
        self.result: subprocess.CompletedProcess[str] | None = None
        self.options = [
            "algorithm.adv_estimator=grail",
            "data.train_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.total_epochs=1000",
            "trainer.total_training_steps=1000",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=1",
            *overrides,
        ]

        def run() -> None:
            self.result = whole_run.start(folder, self.options, rows=rows, **environment)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _find(self) -> None:
        """Note the driver and the processes below it."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            # The driver alone has this option on its command line.
            if f"hydra.run.dir={self.folder / 'hydra'}" in words and "-m" in words[:3]:
                with contextlib.suppress(psutil.Error):
                    self.everybody |= {process, *process.children(recursive=True)}

    def await_step(self, step: int) -> None:
        """Wait until a step is logged; then the run's processes are known."""
        path = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + STARTED_IN
        while not (path.exists() and path.read_text().count("\n") >= step):
            waits = self._thread.is_alive() and time.monotonic() < deadline
            assert waits, [
                (self.folder / name).read_text()[-3000:] for name in whole_run.SAID
            ]
            time.sleep(0.2)
        self._find()

    @property
    def engine(self) -> int:
        """The process id of a vLLM engine."""
        return next(
            process.pid
            for process in filter(lives, self.everybody)
            if "VLLM::EngineCore" in " ".join(process.cmdline())
        )

    def end(self, seconds: float) -> None:
        """Wait until the run has ended, and every process that was there is gone, with those that came below it since."""
        deadline = time.monotonic() + seconds
        while (living := [*filter(lives, self.everybody)]) or self._thread.is_alive():
            assert time.monotonic() < deadline, (
                f"after {seconds:.0f} s are still there: {living}"
            )
            for process in living:
                with contextlib.suppress(psutil.Error):
                    self.everybody |= set(process.children(recursive=True))
            time.sleep(1)

    def kill_all(self) -> None:
        """A test that failed ends the processes that it leaves."""
        self._find()
        for process in self.everybody:
            with contextlib.suppress(psutil.Error):
                process.kill()


def lives(process: psutil.Process) -> bool:
    """Whether it is more than an exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
