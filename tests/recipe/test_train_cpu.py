"""The CPU example started again and again, with a stand-in for all that takes time: what it keeps and what it moves away."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.clone import ROOT
from tests.run_life.processes import comes_true, lives

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


@pytest.fixture
def folder(tmp_path):
    """The scripts in a folder of their own."""
    folder = tmp_path / "it's, [1] a=b ~"
    files = {"scripts/setup_cpu.sh": "", ".venv/bin/python": STAND_IN, "status.txt": "0"}
    for name in (
        "examples/run_tiny_cpu_grail.sh",
        "scripts/knobs.sh",
        "scripts/train_cpu.sh",
    ):
        files[name] = (ROOT / name).read_text()
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return folder


def begin(folder: Path, **knobs: str) -> psutil.Popen:
    return psutil.Popen(
        ["bash", "examples/run_tiny_cpu_grail.sh"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "OUTPUT_DIR": "out", **knobs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(folder: Path, **knobs: str) -> tuple[int, str]:
    running = begin(folder, **knobs)
    output, _ = running.communicate(timeout=60)
    return running.returncode, output


def test_a_second_start_keeps_everything_and_fresh_moves_it_away(folder):
    """A run that fails ends with its last lines."""
    (folder / "status.txt").write_text("7")
    status, output = start(folder)
    assert status == 1
    assert output.endswith("already finished: a checkpoint\n")
    (folder / "status.txt").write_text("0")
    out = folder / "out/seed0"
    (out / "grail/mine").touch()
    status, output = start(folder)
    assert status == 0
    assert "already finished: a checkpoint\n" in output
    assert "report.html" in output
    assert (out / "grail/mine").exists()
    assert (out / "grail.log").read_text().count("a life") == 2
    # Each fresh start moves the folder of the one before to the next number.
    for number in (1, 2):
        assert start(folder, FRESH="1")[0] == 0
        assert (out / f"grail.{number}").exists()
    assert (out / "grail.1/mine").exists()
    assert not (out / "grail/mine").exists()


def test_a_run_that_lives_keeps_its_folder_and_ends_with_the_script(folder):
    """By SIGTERM to the script alone, which the run does not get."""
    (folder / "lives").touch()
    running = begin(folder)
    out = folder / "out/seed0"
    try:
        assert comes_true((out / "grail/checkpoints").exists)
        children = running.children(recursive=True)
        # A second start is refused while the first one lives, also one that would move its folder away.
        assert [start(folder, FRESH=fresh)[0] for fresh in ("0", "1")] == [1, 1]
        assert (out / "grail.log").read_text().count("a life") == 1
        assert not (out / "grail.1").exists()
        running.terminate()
        assert running.wait(timeout=30) == -signal.SIGTERM
        assert comes_true(lambda: not any(map(lives, children)))
    finally:
        (folder / "lives").unlink()
        if running.poll() is None:
            running.kill()
