"""A run that ends says why, and leaves nothing but what a user detached: a real Ray, without verl."""

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

import psutil
import pytest

from tests.run_life.killed_run import lives

ROOT = Path(__file__).parents[2]
BOUND = 600.0
"""Seconds within which everything is to be gone."""
STARTED_IN = 900.0
"""Seconds within which a run starts, beside four others and whatever else the machine does."""


def _await(there: Callable[[], bool], what: str, seconds: float = BOUND) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class _Run:
    """A run of ``ending_run``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.everybody: set[psutil.Process] = set()
        command = [sys.executable, "-m", "tests.run_life.ending_run", str(folder)]
        with (folder / "said").open("w") as output:
            # Background jobs of a shell, such as these tests, have Ctrl-C ignored, and so have their children.
            hears = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            self.driver = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=hears)

    def processes(self) -> dict[str, int]:
        """The ids of driver, trainer, worker and the worker's children, once they are there."""
        path = self.folder / "processes.json"
        _await(lambda: path.exists() or self.driver.poll() is not None, "the run did not start", STARTED_IN)
        processes = {**json.loads(path.read_text()), "driver": self.driver.pid}
        self.everybody = {*self.driver.children(recursive=True), *map(psutil.Process, processes.values())}
        return processes

    def close(self) -> None:
        below = self.driver.children(recursive=True) if lives(self.driver) else []
        for process in [self.driver, *below, *self.everybody]:
            if lives(process):
                process.kill()
        self.driver.wait()


WATCH = "watchdog: this run cannot go on"
ENDINGS = {
    "worker": (
        "worker",
        signal.SIGKILL,
        [1],
        [WATCH, "died       Worker the_worker, process", "the worker's last line"],
    ),
    "trainer": ("trainer", signal.SIGKILL, [1], [WATCH, "died       TaskRunner, process", "the trainer's own process"]),
    "driver": ("driver", signal.SIGKILL, [-signal.SIGKILL], []),
    "Ctrl-C": ("driver", signal.SIGINT, None, []),
}
"""The process that gets a signal, how the driver may end (``None``: not with 0), and what is said."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _Run]]:
    """A run for each ending, all at once."""
    started = {name: _Run(tmp_path_factory.mktemp("run")) for name in ENDINGS}
    yield started
    for run in started.values():
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_of_which_one_is_killed_says_who_and_ends_what_is_its_own(runs: dict[str, _Run], name: str) -> None:
    """An actor of the user's has died before, and ended nothing."""
    victim, number, statuses, words = ENDINGS[name]
    run = runs[name]
    processes = run.processes()
    upload = psutil.Process(processes["upload"])
    os.kill(processes[victim], number)
    status = run.driver.wait(timeout=BOUND)
    assert status in statuses if statuses is not None else status != 0
    # Ray ends no children of a worker whose raylet was killed before.
    spared = {upload.pid} | ({processes["child"]} if victim == "driver" and number == signal.SIGKILL else set())

    def left() -> list[str]:
        return [" ".join(each.cmdline()) for each in run.everybody if each.pid not in spared and lives(each)]

    _await(lambda: not left(), f"of the run are still there: {left()}")
    assert lives(upload)
    text = (run.folder / "said").read_text()
    for part in words:
        assert part in text, text
