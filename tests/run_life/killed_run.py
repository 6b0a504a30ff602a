"""A whole verl run in the background, whose engine is killed: which processes are there, and which are left."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from tests.run_life.processes import comes_true, lives
from tests.verl_ext import whole_run

STARTED_IN = 1800.0
"""Seconds within which a run gets somewhere. Beside other tests, on a machine just started, its start alone once took 540."""


class KilledRun:
    """A run of a tiny model in an empty folder; with further options and variables, and so many prompts in the data set."""

    def __init__(
        self, folder: Path, overrides: list[str], *, rows: int, environment: dict[str, str]
    ):
        self.folder = folder
        self.everybody = set[psutil.Process]()
        self.options = [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
            "trainer.total_epochs=1000",
            "trainer.total_training_steps=1000",
            "trainer.save_freq=1",
            *overrides,
        ]
        self.run = ThreadPoolExecutor(1).submit(
            whole_run.start, folder, self.options, rows=rows, **environment
        )

    def _find(self):
        """Note the driver and the processes below it."""
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                # The driver alone has this option on its command line.
                if f"hydra.run.dir={self.folder / 'hydra'}" in process.cmdline():
                    self.everybody |= {process, *process.children(recursive=True)}

    def await_step(self, step: int):
        """Wait until a step is logged; then the run's processes are known."""
        path = self.folder / "metrics.jsonl"

        def is_logged():
            return path.exists() and path.read_text().count("\n") >= step

        comes_true(lambda: is_logged() or self.run.done(), STARTED_IN)
        assert is_logged(), [
            (self.folder / name).read_text()[-3000:] for name in whole_run.SAID
        ]
        self._find()

    @property
    def engine(self) -> psutil.Process:
        """A vLLM engine."""
        return next(
            process
            for process in filter(lives, self.everybody)
            if "VLLM::EngineCore" in " ".join(process.cmdline())
        )

    def end(self, seconds: float):
        """Wait until the run has ended, and every process that was there is gone, with those that came below it since."""

        def is_over():
            living = [*filter(lives, self.everybody)]
            for process in living:
                with suppress(psutil.Error):
                    self.everybody |= {*process.children(recursive=True)}
            return not living and self.run.done()

        assert comes_true(is_over, seconds, pause=1.0), f"were there: {self.everybody}"

    def kill_all(self):
        """A test that failed ends the processes that it leaves."""
        self._find()
        for process in self.everybody:
            with suppress(psutil.Error):
                process.kill()
