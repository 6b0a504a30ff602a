"""Plays mishaps with the CPU demo, in a clone that is set up (scripts/setup_cpu.sh), and shows how each ends.

    python scripts/mishaps.py [--list] [NAME ...]

For each: what was done, the exit status, the last line on the terminal, and where the same command resumes. Exit status 1 where
one did not behave. About a minute a start on two idle cores; a full disk needs the right to mount a tmpfs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
COMMAND = ["bash", str(ROOT / "examples/run_tiny_cpu_grail.sh")]
ODD = "jürgen/Grail (1)/a=b,c [d] {e} 'f' \"g\" #h~i&j"
LIMIT = 900.0
"""Seconds that a start may take."""


class Ended(NamedTuple):
    """How a start ended."""

    status: int
    last: str
    """The last line on the terminal."""
    resumed: int
    """The step that it resumed after; 0: from the beginning, or not at all."""
    said: str
    """All of the terminal, and of this start's log."""


class Start:
    """The demo, started in a folder, with a checkpoint after each of so many steps."""

    def __init__(self, output: Path, steps: int) -> None:
        self.run_dir = output / "seed0/grail"
        self._terminal = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._log_began = self.log.stat().st_size if self.log.exists() else 0
        knobs = {"OUTPUT_DIR": str(output), "SEED": "0", "TOTAL_STEPS": str(steps), "SAVE_FREQ": "1", "TEST_FREQ": "-1"}
        self.process = psutil.Popen(
            [*COMMAND, "trainer.val_before_train=false"],
            env={**os.environ, "PROMPTS": "4", "ROLLOUTS": "2", **knobs},
            stdout=self._terminal,
            stderr=subprocess.STDOUT,
        )

    @property
    def log(self) -> Path:
        return self.run_dir / "train.log"

    def until(self, there: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not there():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come: {self.end().said[-2000:]}")
            time.sleep(0.2)

    def engine_loads(self) -> bool:
        """Whether the rollouts' engine reads the model, seconds before the first step."""
        log = self.log.read_bytes() if self.log.exists() else b""
        return b"Loading safetensors checkpoint shards" in log[self._log_began :]

    def end(self) -> Ended:
        try:
            self.process.wait(LIMIT)
        except psutil.TimeoutExpired:
            self.process.terminate()
            self.process.wait(60)
        self._terminal.seek(0)
        said = self._terminal.read().decode(errors="replace")
        log = self.log.read_bytes()[self._log_began :].decode(errors="replace") if self.log.exists() else ""
        saved = re.search(r"Saving checkpoint to .*/global_step_(\d+)", log)  # the first one, of the first step
        lines = [line for line in said.splitlines() if line.strip()]
        return Ended(self.process.returncode, lines[-1] if lines else "", int(saved[1]) - 1 if saved else 0, said + log)


class Stage:
    """A folder in which each mishap finds the same run of two steps."""

    def __init__(self, folder: Path) -> None:
        self.output, self.kept = folder / "run", folder / "kept"
        self.checkpoints = self.output / "seed0/grail/checkpoints"

    def reset(self) -> None:
        if not self.kept.exists():
            first = Start(self.output, 2).end()
            if first.status:
                raise RuntimeError(f"the demo itself fails here: {first.said[-2000:]}")
            shutil.copytree(self.output, self.kept, symlinks=True)
        shutil.rmtree(self.output, ignore_errors=True)
        shutil.copytree(self.kept, self.output, symlinks=True)

    @contextmanager
    def small_disk(self, size: str) -> Iterator[None]:
        """Within, the run is on a disk of its own."""
        shutil.rmtree(self.output)
        self.output.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(self.output)], check=True)
        try:
            shutil.copytree(self.kept, self.output, symlinks=True, dirs_exist_ok=True)
            yield
        finally:
            subprocess.run(["umount", "-l", str(self.output)], check=True)


class Mishaps:
    """Each returns how its starts ended, and whether that is as it should be."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def full_disk(self) -> tuple[list[Ended], bool]:
        """The output's disk, with its log, has no room from the third step on; then it has again."""
        with self.stage.small_disk("512m"):
            start, ballast = Start(self.stage.output, 4), self.stage.output / "ballast"
            start.until(start.engine_loads, "the engine")
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(b"\0" * 4096):
                        pass
                except OSError:
                    pass
            full = start.end()
            ballast.unlink()
            again = Start(self.stage.output, 4).end()
        return [full, again], full.status != 0 and "no space" in full.last and again.status == 0 and again.resumed >= 2

    def worker_killed(self) -> tuple[list[Ended], bool]:
        """SIGKILL of a worker that trains; then the same command."""
        start = Start(self.stage.output, 30)
        start.until(lambda: (self.stage.checkpoints / "global_step_3/data.pt").exists(), "the third step")
        next(each for each in start.process.children(recursive=True) if "WorkerDict" in _title(each)).kill()
        killed, again = start.end(), Start(self.stage.output, 5).end()
        good = killed.status != 0 and "SIGKILL" in killed.last and again.status == 0 and again.resumed >= 2
        return [killed, again], good

    def truncated_checkpoint(self) -> tuple[list[Ended], bool]:
        """The last checkpoint's optimiser lost its last bytes."""
        path = self._file("optim*.pt")
        os.truncate(path, path.stat().st_size - 100)
        return self._before(path)

    def flipped_bit(self) -> tuple[list[Ended], bool]:
        """A bit in the middle of the last checkpoint's weights is another one."""
        path = self._file("model*.pt")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return self._before(path)

    def two_starts(self) -> tuple[list[Ended], bool]:
        """The same command again while the run lives."""
        start = Start(self.stage.output, 4)
        start.until(start.engine_loads, "the engine")
        second = Start(self.stage.output, 4).end()
        first = start.end()
        return [second, first], second.status != 0 and "run that lives" in second.last and first.status == 0

    def odd_folder(self) -> tuple[list[Ended], bool]:
        """A folder with quotes, brackets, blanks, =, #, ~ and & in its name."""
        output = self.stage.kept.parent / ODD
        ended = Start(output, 1).end()
        return [ended], ended.status == 0 and (output / "seed0/grail/checkpoints/global_step_1/data.pt").exists()

    def _file(self, name: str) -> Path:
        return next((self.stage.checkpoints / "global_step_2/actor").glob(name))

    def _before(self, path: Path) -> tuple[list[Ended], bool]:
        ended = Start(self.stage.output, 3).end()
        return [ended], ended.status == 0 and ended.resumed == 1 and path.name in ended.said


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def main() -> None:
    names = [name for name in vars(Mishaps) if not name.startswith("_")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--list", action="store_true", help="the names, and what each does")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no mishap {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        print("\n".join(f"{name}: {getattr(Mishaps, name).__doc__}" for name in names))
        return
    bad = []
    with tempfile.TemporaryDirectory(prefix="mishaps_") as folder:
        stage = Stage(Path(folder))
        for name in options.names or names:
            stage.reset()
            print(f"{name}: {getattr(Mishaps, name).__doc__}", flush=True)
            try:
                starts, good = getattr(Mishaps(stage), name)()
            except (subprocess.CalledProcessError, RuntimeError, StopIteration) as error:
                starts, good = [], name == "full_disk" and isinstance(error, subprocess.CalledProcessError)
                print(f"  {'left out, as nothing can be mounted' if good else 'not played'}: {error}")
            for ended in starts:
                print(f"  exit status {ended.status}, resumed after step {ended.resumed}; last line: {ended.last}")
            print("  as it should be" if good else "  NOT as it should be", flush=True)
            bad += [] if good else [name]
    sys.exit(f"not as it should be: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
