"""The CPU example started again and again, with a stand-in for all that takes time: what it keeps and what it moves away."""

from __future__ import annotations

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
# Each call is a line of calls.txt; the trainer "trains" until told to end.
echo "$*" >>calls.txt
case "$2" in
verl.trainer.main_ppo)
    [[ ${{DRY_RUN:-0}} == 0 ]] || {{ echo "run: {{folder: \\"$OUTPUT_DIR/seed0/grail\\"}}" && exit; }}
    echo "a life" && mkdir -p "$OUTPUT_DIR/seed0/grail/checkpoints"
    while [[ -e lives ]]; do sleep 0.1; done
    echo "already finished: a checkpoint" && exit "$(<status.txt)" ;;
grail_advantage.report) echo report.html ;;
verl_cpu.tiny.prepare) ;;
*) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


class Project:
    """The scripts in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out/seed0"
        scripts = ("examples/run_tiny_cpu_grail.sh", "scripts/train_cpu.sh")
        files = {"scripts/setup_cpu.sh": "", ".venv/bin/python": STAND_IN}
        for name, text in (files | {name: (ROOT / name).read_text() for name in scripts}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / ".venv/bin/python").chmod(0o755)

    def begin(self, **knobs: str) -> psutil.Popen:
        variables = {"PATH": "/usr/bin:/bin", "OUTPUT_DIR": "out", **knobs}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return psutil.Popen(["bash", "examples/run_tiny_cpu_grail.sh"], cwd=self.folder, env=variables, **pipes)

    def start(self, **knobs: str) -> tuple[int, str]:
        running = self.begin(**knobs)
        output, _ = running.communicate(timeout=60)
        return running.returncode, output

    def lives(self) -> int:
        return (self.out / "grail.log").read_text().count("a life")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "it's, [1] a=b ~")


def test_a_second_start_keeps_everything_and_fresh_moves_it_away(project: Project) -> None:
    """A run that fails ends with its last lines."""
    (project.folder / "status.txt").write_text("7")
    status, output = project.start()
    assert status == 1 and output.endswith("already finished: a checkpoint\n")
    (project.folder / "status.txt").write_text("0")
    (project.out / "grail/mine").touch()
    status, output = project.start()
    assert status == 0 and "already finished: a checkpoint\n" in output and "report.html" in output
    assert (project.out / "grail/mine").exists() and project.lives() == 2
    for number in (1, 2):
        assert project.start(FRESH="1")[0] == 0 and (project.out / f"grail.{number}").exists()
    assert (project.out / "grail.1/mine").exists() and not (project.out / "grail/mine").exists()


def test_a_run_that_lives_keeps_its_folder_and_ends_with_the_script(project: Project) -> None:
    """By SIGTERM to the script alone, which the run does not get."""
    (project.folder / "lives").touch()
    running, deadline = project.begin(), time.monotonic() + 30
    try:
        while not (project.out / "grail/checkpoints").exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        others = running.children(recursive=True)
        assert [project.start(FRESH=fresh)[0] for fresh in ("0", "1")] == [1, 1]
        assert project.lives() == 1 and not (project.out / "grail.1").exists()
        running.terminate()
        assert running.wait(timeout=30) == -signal.SIGTERM
        while any(map(lives, others)):
            assert time.monotonic() < deadline, others
            time.sleep(0.05)
    finally:
        (project.folder / "lives").unlink()
        for process in filter(lives, [running]):
            process.kill()
