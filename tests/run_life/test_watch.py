"""When the watch ends a run and when it does not; and real processes on Ray, without verl, of which one is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from recipe.run_life import watch
from recipe.run_life.watch import HEADLINE, RunEnded, Watch, refuses
from tests.clone import ROOT
from tests.run_life.processes import comes_true, lives

BOUND = 900.0
"""Seconds within which runs start and everything is gone, beside others and whatever else the machine does."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray's own that take a minute to end after a SIGKILL of the command (docs/fault_tolerance.md)."""


@pytest.fixture
def dead(monkeypatch):
    """The watch's deaths."""
    monkeypatch.setattr(watch, "NOTICE_SECONDS", 0.1)
    dead = []
    monkeypatch.setattr(Watch, "deaths", lambda self: list(dead))
    return dead


def test_an_error_is_explained_by_a_death_alone(dead):
    watched = Watch(list, list)
    with pytest.raises(OSError), watched.guard():
        raise OSError("the disk is full")
    dead.append("The actor died unexpectedly before finishing this task.")
    with pytest.raises(RunEnded, match=dead[0]) as ended, watched.guard():
        raise OSError("a rank does not answer")
    assert isinstance(ended.value.__cause__, OSError)
    # Once nothing is left to do, actors may go.
    with watched.guard():
        pass


def test_the_trainer_is_interrupted(dead, monkeypatch):
    """In a lock, as verl's, and though Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(watch, "INTERVAL", 0.05)
    monkeypatch.setattr(watch.os, "_exit", lambda status: None)
    dead.append("gone")
    with pytest.raises(RunEnded) as ended, Watch(list, list).guard():
        threading.Event().wait(30)
    assert isinstance(ended.value.__cause__, KeyboardInterrupt)


def test_an_engine_is_dead_if_its_server_says_so_twice(monkeypatch):
    """A server that is slow is not."""
    monkeypatch.setattr(watch, "SECONDS", 0.5)
    status = [200]
    slow = 0

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            if status[0] == slow:
                time.sleep(1)
            self.send_response(status[0] or 503)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        address = f"127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        looks = Watch(list, lambda: [address])
        for status[0], deaths in ((200, 0), (503, 0), (503, 1), (200, 0), (slow, 0)):
            assert len(looks.deaths()) == deaths
        server.shutdown()
    assert refuses(address), "nobody listens there any more"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("worker", 1), ("driver", -signal.SIGKILL)])
def test_a_run_of_which_one_is_killed_says_who_and_ends_what_is_its_own(
    tmp_path, name, status
):
    """A process of the user's has died before, and ended nothing."""
    command = [sys.executable, "-m", "tests.run_life.ending_run", str(tmp_path)]
    with (tmp_path / "output").open("w") as output:
        driver = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    everybody = {driver}
    try:
        path = tmp_path / "processes.json"
        assert comes_true(lambda: path.exists() or driver.poll() is not None, BOUND)
        processes = {**json.loads(path.read_text()), "driver": driver.pid}
        everybody |= {
            *driver.children(recursive=True),
            *map(psutil.Process, processes.values()),
        }
        spared = {processes["upload"]}
        if name == "driver":
            # Ray ends no children of a worker whose raylet was killed before.
            spared.add(processes["child"])
            for member in filter(lives, everybody):
                if " ".join(member.cmdline()).startswith(AGENTS):
                    spared.add(member.pid)
        # As the kernel does where memory runs short.
        os.kill(processes[name], signal.SIGKILL)
        assert driver.wait(timeout=BOUND) == status
        mortal = [member for member in everybody if member.pid not in spared]
        assert comes_true(lambda: not any(map(lives, mortal)), BOUND)
        assert lives(psutil.Process(processes["upload"]))
        text = (tmp_path / "output").read_text()
        for part in (HEADLINE, "class_name: Worker", "name: the_worker"):
            assert name == "driver" or part in text
    finally:
        for process in filter(lives, everybody):
            process.kill()
