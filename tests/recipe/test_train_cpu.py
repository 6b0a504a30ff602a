"""The CPU example started again and again, with a stand-in for everything that takes time: what it keeps and what it moves
away."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.run_life.killed_run import lives

ROOT = Path(__file__).parents[2]
STAND_IN = f"""#!/usr/bin/env bash
# Each call is a line of calls.txt; the trainer "trains" up to the step in steps.txt; at 99 it does not end.
echo "$*" >>calls.txt
case "$2 $3" in
"recipe.launch --begin") PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} "$@" ;;
"verl_cpu.tiny.prepare "*)
    mkdir -p out/seed0 && cat model.txt >out/seed0/warm_up.json ;;
"recipe.launch "*)
    [[ ${{DRY_RUN:-0}} == 1 ]] && exit 0
    step=$(<steps.txt)
    echo "a life"
    mkdir -p out/seed0/grail/checkpoints/global_step_"$step"
    if [[ $step == 99 ]]; then exec flock --no-fork out/seed0/grail/checkpoints/.run.lock sleep 300; fi
    echo "already finished: a checkpoint"
    ;;
"grail_advantage.report "*)
    [[ $4 == --summary ]] || {{ echo report.html && exit; }}
    while kill -0 "$6" 2>/dev/null; do sleep 0.1; done
    echo "the summary"
    ;;
esac
"""


class Project:
    """The scripts in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").mkdir(parents=True)
        (folder / "scripts").mkdir()
        (folder / ".venv/bin").mkdir(parents=True)
        for name in ("examples/run_tiny_cpu_grail.sh", "scripts/train_cpu.sh"):
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "scripts/setup_cpu.sh").write_text("")
        (folder / ".venv/bin/python").write_text(STAND_IN)
        (folder / ".venv/bin/python").chmod(0o755)
        (folder / "model.txt").write_text("a model")
        self.steps = 20

    def start(self, *arguments: str, **knobs: str) -> subprocess.CompletedProcess[str]:
        running = self.begin(*arguments, **knobs)
        stdout, stderr = running.communicate(timeout=60)
        return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)

    def begin(self, *arguments: str, **knobs: str) -> subprocess.Popen[str]:
        (self.folder / "steps.txt").write_text(str(self.steps))
        return subprocess.Popen(
            ["bash", "examples/run_tiny_cpu_grail.sh", *arguments],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "OUTPUT_DIR": str(self.folder / "out"), **knobs},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def children_at(self, running: subprocess.Popen[str], file: str) -> list[psutil.Process]:
        """The processes of a run as soon as it has made a file."""
        deadline = time.monotonic() + 30
        while not (self.run_dir / file).exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return psutil.Process(running.pid).children(recursive=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "out/seed0/grail"

    def trained(self) -> list[str]:
        """The trainer's calls."""
        calls = (self.folder / "calls.txt").read_text().splitlines()
        return [line for line in calls if line.startswith("-m recipe.launch tiny_cpu")]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "it's, [1] a=b ~")


def test_a_second_start_keeps_everything_and_says_that_the_run_is_finished(project: Project) -> None:
    first = project.start()
    assert first.returncode == 0 and "  12 steps; full output: " in first.stdout
    assert len(project.trained()) == 1
    kept = [project.run_dir / name / "of the first" for name in ("tensorboard", "tokens")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    again = project.start()
    assert again.returncode == 0, again.stderr
    assert "already finished: a checkpoint\n" in again.stdout and "the summary\n" in again.stdout
    assert all(path.exists() for path in kept)
    assert (project.run_dir / "train.log").read_text().count("a life") == 2


def test_fresh_moves_the_earlier_run_away(project: Project) -> None:
    first = project.start(FRESH="1")
    assert first.returncode == 0 and "FRESH=1" not in first.stderr, "there is no earlier run"
    (project.run_dir / "mine").write_text("")
    for number in (1, 2):
        fresh = project.start(FRESH="1")
        assert fresh.returncode == 0, fresh.stderr
        assert f"FRESH=1: the earlier run is in {project.run_dir}.{number} now" in fresh.stderr
    assert (Path(f"{project.run_dir}.1") / "mine").exists()
    assert not (project.run_dir / "mine").exists() and not (Path(f"{project.run_dir}.2") / "mine").exists()
    # A model made anew, by another version of the example, say, would be mixed with the old one's checkpoints.
    (project.folder / "model.txt").write_text("another model")
    refused = project.start()
    assert refused.returncode == 1
    assert "another model and other problems" in refused.stderr and "FRESH=1" in refused.stderr
    assert len(project.trained()) == 3
    assert project.start(FRESH="1").returncode == 0


def test_a_run_that_lives_keeps_its_folder(project: Project) -> None:
    project.steps = 99
    running = project.begin()
    others: list[psutil.Process] = []
    try:
        others = project.children_at(running, "checkpoints/.run.lock")
        project.steps = 20
        log = (project.run_dir / "train.log").read_text()
        for fresh in ("0", "1"):
            second = project.start(FRESH=fresh)
            assert (
                second.returncode == 1
                and "belongs to a run that lives" in second.stderr
                and "OUTPUT_DIR" in second.stderr
            )
        assert len(project.trained()) == 1 and (project.run_dir / "train.log").read_text() == log
        assert project.start(DRY_RUN="1").returncode == 0
        running.kill()
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        running.communicate(timeout=30)
        assert project.start().returncode == 0 and project.start(FRESH="1").returncode == 0
        assert Path(f"{project.run_dir}.1").exists() and not Path(f"{project.run_dir}.2").exists()
    finally:
        for process in filter(lives, others):
            process.kill()
        running.kill()
        running.communicate(timeout=30)


def test_the_run_ends_with_the_script(project: Project) -> None:
    """By SIGTERM to the script alone, which the run does not get."""
    project.steps = 99
    running = project.begin()
    others: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    try:
        others = project.children_at(running, "checkpoints/global_step_99")
        running.terminate()
        assert running.wait(timeout=30) == -signal.SIGTERM
        while any(map(lives, others)):
            assert time.monotonic() < deadline, others
            time.sleep(0.05)
    finally:
        for process in filter(lives, others):
            process.kill()
        running.communicate(timeout=30)
