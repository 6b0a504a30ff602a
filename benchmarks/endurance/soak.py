"""A soak: the CPU example for hundreds of steps, killed again and again, each time at another place, and started again.

Every start is the same command; a life of the run lasts from a start to its end. The soak watches it from outside. At set steps
it kills one process with SIGKILL and waits until the run has ended by itself, or ends it with SIGTERM and records that.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from recipe.run_life.checkpoints import PARTS, damage

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "run_tiny_cpu_grail.sh"
EVERY = 10
"""Steps between two checkpoints."""
KNOBS = {"PROMPTS": "4", "ROLLOUTS": "4", "LEARNING_RATE": "3e-5", "SAVE_FREQ": str(EVERY), "TEST_FREQ": "100"}
KNOBS["OMP_NUM_THREADS"] = "1"
INTERVAL, LEFT = 5.0, 15.0
"""Seconds between two records of the memory, and after a life's end at which processes of it are left behind."""
CHECKPOINT = "a worker, while it writes a checkpoint"
ROLES = {
    "driver": r"-m recipe\.main_grail",
    "trainer": r"^ray::TaskRunner",
    "actor worker": r"^ray::WorkerDict",
    "rollout server": r"^ray::\w*HttpServer",
    "rollout engine": r"^VLLM::",
    "agent loop worker": r"^ray::\w*AgentLoopWorker",
    "reward worker": r"^ray::\w*RewardLoopWorker",
    "TransferQueue": r"^ray::(SimpleStorage|TransferQueue)",
    "Ray": r"^ray::|/ray/|ray/_private|raylet|gcs_server",
    "rest": "",
}
"""By the title of a process; the first that fits."""
KILLED: tuple[str, ...] = ("driver", "actor worker", "rollout server", CHECKPOINT)
KILLED += ("reward worker", "agent loop worker", "rollout engine", "trainer")
"""Where the soak strikes, in this order."""


def title(process: psutil.Process) -> str:
    """The words that a process calls itself by; empty where it is gone."""
    try:
        return " ".join(" ".join(process.cmdline()).split())
    except psutil.Error:
        return ""


def role_of(words: str) -> str:
    """One of ``ROLES``."""
    return next(name for name, pattern in ROLES.items() if re.search(pattern, words))


def kill_plan(steps: int) -> list[tuple[int, str]]:
    """When to strike where: evenly over the run, between two checkpoints."""
    gap = steps / (len(KILLED) + 1)
    return [(round(gap * (i + 1)) // EVERY * EVERY + EVERY // 2, place) for i, place in enumerate(KILLED)]


def last_words(log: Path, run_dir: Path) -> str:
    """Of the watchdog's message who died, when, and what now; or the last error."""
    lines = [re.sub(r"\s{2,}", " ", line.strip()) for line in log.read_text(errors="replace").splitlines()]
    words = [line for line in lines if re.match(r"(died|also died|when|what now)\s", line)]
    rest = [line for line in lines if re.search(r"was killed|Error: |already finished", line)]
    return "; ".join(words or rest[-1:]).replace(str(run_dir), "RUN")[:400]


class Soak:
    """Starts the run again and again until it is finished; what it sees goes to CSV files in the folder."""

    def __init__(self, folder: Path, steps: int, kills: int, patience: float) -> None:
        self.folder, self.run_dir, self.patience = folder, folder / "seed0" / "grail", patience
        machine = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.machine()}"
        self.plan: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "began": time.time(), "steps": steps}
        self.plan |= {"patience": patience, "machine": machine, "knobs": KNOBS, "kills": kill_plan(steps)[:kills]}
        self.lives: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.seen: dict[psutil.Process, str] = {}
        """Every process that the current life had, with its title."""

    def now(self) -> float:
        """Seconds since the soak began."""
        return round(time.time() - self.plan["began"], 2)

    def run(self) -> None:
        """Live until the run is finished."""
        # The model is made before, so that no life counts the time for it.
        command = f"{sys.executable} -m recipe.tiny.prepare --seed 0 --output-dir {self.folder}/seed0"
        subprocess.run(shlex.split(command), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (self.folder / "plan.json").write_text(json.dumps(self.plan, indent=2) + "\n")
        kills = list(self.plan["kills"])
        for number in range(1, 4 * len(kills) + 5):
            print(f"life {number}, next kill {kills[0] if kills else 'none'}", flush=True)
            self.lives.append(self.live(number, kills[0] if kills else None))
            print(self.lives[-1], flush=True)
            pd.DataFrame(self.lives).to_csv(self.folder / "lives.csv", index=False)
            pd.DataFrame(self.memory).to_csv(self.folder / "memory.csv", index=False)
            if self.lives[-1]["killed"]:
                kills.pop(0)
            elif self.lives[-1]["status"] == 0:
                return
        raise RuntimeError(f"the run did not finish in {number} lives")

    def live(self, number: int, kill: tuple[int, str] | None) -> dict[str, Any]:
        """Start the run, strike where a kill is planned, and wait for the end."""
        life: dict[str, Any] = {"number": number, "started": self.now(), "resumed_from": 0, "first_step_at": None}
        life |= {
            "killed": "",
            "killed_process": "",
            "killed_at": None,
            "last_step": 0,
            "ended": 0,
            "ended_by": "itself",
        }
        knobs = self.plan["knobs"] | {"TOTAL_STEPS": str(self.plan["steps"]), "OUTPUT_DIR": str(self.folder)}
        tracker, before = self.run_dir / "checkpoints/latest_checkpointed_iteration.txt", self.metrics_file()
        with (self.run_dir.parent / f"life-{number}.log").open("wb") as log:
            run = subprocess.Popen(
                ["bash", str(SCRIPT)],
                env=os.environ | knobs,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        recorded, self.seen = 0.0, {}
        while run.poll() is None:
            life["last_step"] = self.last_step()
            # A life replaces the file when it begins to log, and saves no checkpoint before.
            if life["first_step_at"] is None and self.metrics_file() != before:
                life["resumed_from"] = int(tracker.read_text()) if tracker.exists() else 0
                life["first_step_at"] = self.now() if life["last_step"] > life["resumed_from"] else None
            if self.now() - recorded >= INTERVAL:
                recorded = self.now()
                self.record_memory(life, run.pid)
            if kill and life["first_step_at"] and not life["killed"] and life["last_step"] >= kill[0]:
                self.strike(life, kill[1], run.pid)
            if life["killed"] and self.now() - life["killed_at"] > self.patience and life["ended_by"] == "itself":
                life["ended_by"] = "SIGTERM"
                os.killpg(run.pid, signal.SIGTERM)
            time.sleep(0.5)
        life["last_step"] = self.last_step()
        return life | {"ended": self.now(), "status": run.returncode, "left_behind": self.left_behind()}

    def metrics_file(self) -> int | None:
        """The file that is there, by its number."""
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def last_step(self) -> int:
        """The last step in the metrics file, without a line that is being written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)

    def processes(self, root: int) -> dict[psutil.Process, str]:
        """Those of the life that are there, with their titles."""
        try:
            process = psutil.Process(root)
            there = {one: title(one) for one in (process, *process.children(recursive=True))}
        except psutil.Error:
            return {}
        self.seen |= there
        return there

    def record_memory(self, life: dict[str, Any], root: int) -> None:
        """The proportional share of the memory (PSS) of all processes of a role, in MiB."""
        shares: dict[str, list[float]] = {}
        at = {"seconds": round(self.now(), 1), "life": life["number"], "step": life["last_step"]}
        for process, words in self.processes(root).items():
            try:
                shares.setdefault(role_of(words), []).append(process.memory_full_info().pss / 2**20)
            except psutil.Error:
                continue
        for role, found in shares.items():
            self.memory.append(at | {"role": role, "processes": len(found), "mebibytes": round(sum(found), 1)})

    def strike(self, life: dict[str, Any], place: str, root: int) -> None:
        """Kill one process; at ``CHECKPOINT`` once the next checkpoint is begun."""
        role = "actor worker" if place == CHECKPOINT else place
        for target, words in self.processes(root).items():
            if role_of(words) != role:
                continue
            begun = self.run_dir / "checkpoints" / f"global_step_{(self.last_step() // EVERY + 1) * EVERY}"
            while place == CHECKPOINT and not (begun / "actor").exists() and target.is_running():
                time.sleep(0.0005)
            target.kill()
            life |= {"killed": place, "killed_at": self.now(), "killed_process": words[:60]}
            if place == CHECKPOINT:
                absent = ", ".join(damage(begun, tuple(PARTS))) or "nothing"
                life["killed_process"] += f"; of {begun.name} missing: {absent}"
            life["last_step"] = self.last_step()
            return

    def left_behind(self) -> str:
        """Processes of the life that are there a while after its end; they are ended."""
        _, left = psutil.wait_procs(list(self.seen), timeout=LEFT)
        for process in left:
            process.kill()
        return "; ".join(sorted(self.seen[process][:120] or "(no name)" for process in left))
