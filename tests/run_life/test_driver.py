"""A run that ends says why, and leaves nothing but what a user detached: a real Ray, without verl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.run_life.killed_run import lives

ROOT = Path(__file__).parents[2]
BOUND = 900.0
"""Seconds within which runs start and everything is gone, beside others and whatever else the machine does."""
WATCH = "watchdog: this run cannot go on"
ENDINGS = {
    "worker": (1, [WATCH, "died       Worker the_worker, process", "the worker's last line"]),
    "driver": (-signal.SIGKILL, []),
}
"""The process that is killed, how the driver ends, and what is said."""


def _await(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _start(folder: Path) -> psutil.Popen:
    command = [sys.executable, "-m", "tests.run_life.ending_run", str(folder)]
    with (folder / "said").open("w") as output:
        return psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, psutil.Popen]]]:
    """A run for each ending, all at once."""
    folders = {name: tmp_path_factory.mktemp("run") for name in ENDINGS}
    started = {name: (folder, _start(folder)) for name, folder in folders.items()}
    yield started
    for _, driver in started.values():
        for process in [*(driver.children(recursive=True) if lives(driver) else []), driver]:
            if lives(process):
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_of_which_one_is_killed_says_who_and_ends_what_is_its_own(
    runs: dict[str, tuple[Path, psutil.Popen]], name: str
) -> None:
    """A process of the user's has died before, and ended nothing."""
    status, words = ENDINGS[name]
    folder, driver = runs[name]
    path = folder / "processes.json"
    _await(lambda: path.exists() or driver.poll() is not None, "the run did not start")
    processes = {**json.loads(path.read_text()), "driver": driver.pid}
    everybody = {*driver.children(recursive=True), *map(psutil.Process, processes.values())}
    upload = psutil.Process(processes["upload"])
    try:
        os.kill(processes[name], signal.SIGKILL)
        assert driver.wait(timeout=BOUND) == status
        # Ray ends no children of a worker whose raylet was killed before.
        spared = {upload.pid} | ({processes["child"]} if name == "driver" else set())
        _await(lambda: not any(lives(each) for each in everybody if each.pid not in spared), f"not gone: {everybody}")
        assert lives(upload)
        text = (folder / "said").read_text()
        assert all(part in text for part in words), text
    finally:
        for process in filter(lives, everybody):
            process.kill()
