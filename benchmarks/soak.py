"""A soak: the CPU example for hundreds of steps, killed again and again, each time at another place, and started again.

    python benchmarks/soak.py run --output-dir DIR       starts the same command until the run is finished; an hour on two cores
    python benchmarks/soak.py page DIR                   docs/soak/ from what was recorded: page, plots, and the records as CSV
    python benchmarks/soak.py later DIR                  the memory of a later soak without kills (--kills 0) beside it

Every start is ``bash examples/run_tiny_cpu_grail.sh`` with the same knobs. A life of the run lasts from a start to its end. The
soak watches it from outside: steps from ``metrics.jsonl``, processes and their memory from ``/proc``. At set steps it kills one
process with SIGKILL and waits until the run has ended by itself; where that takes longer than ``--patience`` it ends the run
with SIGTERM and records that. ``DIR/soak.log`` says how far it is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from recipe.run_life.checkpoints import PARTS, damage

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "soak"
ENGINE = ROOT / "benchmarks" / "results" / "engine_memory-cpu.json"
SCRIPT = "examples/run_tiny_cpu_grail.sh"
KNOBS = {
    "PROMPTS": "4",
    "ROLLOUTS": "4",
    "LEARNING_RATE": "3e-5",
    "SAVE_FREQ": "10",
    "TEST_FREQ": "100",
    "OMP_NUM_THREADS": "1",
}
"""Small steps. What else the example reads is at its default."""
INTERVAL = 5.0
"""Seconds between two records of the memory."""
LEFT = 15.0
"""Seconds after a life's end at which processes of it are left behind."""
CHECKPOINT = "a worker, while it writes a checkpoint"
WARM_UP = 10
"""First steps of a life, in which the processes fill their caches; the memory's slope begins behind them."""
ENDING = 15.0
"""Seconds before the end of a life that do not count for the slope."""


def _titled(pattern: str) -> Callable[[psutil.Process], bool]:
    return lambda process: re.search(pattern, title(process)) is not None


ROLES: dict[str, Callable[[psutil.Process], bool]] = {
    "driver": _titled(r"-m recipe\.main_grail"),
    "trainer": _titled(r"^ray::TaskRunner"),
    "actor worker": _titled(r"^ray::WorkerDict"),
    "rollout server": _titled(r"^ray::\w*HttpServer"),
    "rollout engine": _titled(r"^VLLM::"),
    "agent loop worker": _titled(r"^ray::\w*AgentLoopWorker"),
    "reward worker": _titled(r"^ray::\w*RewardLoopWorker"),
    "TransferQueue": _titled(r"^ray::(SimpleStorage|TransferQueue)"),
    "Ray": _titled(r"^ray::|/ray/|ray/_private|raylet|gcs_server"),
}
"""By what a process calls itself; the first that fits."""
REST = "rest"
KILLED = (
    "driver",
    "actor worker",
    "rollout server",
    CHECKPOINT,
    "reward worker",
    "agent loop worker",
    "rollout engine",
    "trainer",
)
"""Where the soak strikes, in this order."""


@dataclass
class Life:
    """One start of the run, to its end."""

    number: int
    started: float
    """Seconds since the soak began, as all times here."""
    resumed_from: int = 0
    """The step of the checkpoint that it went on from."""
    first_step_at: float | None = None
    """When its first new step was logged."""
    killed: str = ""
    """The place; empty where nothing was killed."""
    killed_process: str = ""
    killed_at: float | None = None
    last_step: int = 0
    """The last step that was logged when it ended."""
    ended: float = 0.0
    ended_by: str = ""
    """``itself``, or ``SIGTERM`` where it did not end within the soak's patience."""
    status: int | None = None
    left_behind: str = ""
    """Processes that were still there a while later."""
    message: str = ""
    """The last line that the run said of its end."""


@dataclass
class Memory:
    """The proportional share of the memory (PSS) of all processes of a role, in MiB."""

    seconds: float
    life: int
    step: int
    role: str
    processes: int
    mebibytes: float


@dataclass
class Records:
    """What a soak writes down."""

    lives: list[Life] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)


def title(process: psutil.Process) -> str:
    """What a process calls itself; empty where it is gone."""
    try:
        return " ".join(" ".join(process.cmdline()).split())
    except psutil.Error:
        return ""


def role_of(process: psutil.Process) -> str:
    """One of ``ROLES``, or ``REST``."""
    return next((name for name, fits in ROLES.items() if fits(process)), REST)


def proportional_share(pid: int) -> float:
    """PSS in MiB; shared pages count as one part for each process that has them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) / 1024 if match else 0.0


def logged_steps(run_dir: Path) -> list[int]:
    """The steps in the metrics file, without a line that is being written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]


def kill_plan(steps: int) -> list[tuple[int, str]]:
    """When to strike where: evenly over the run, between two checkpoints."""
    every = int(KNOBS["SAVE_FREQ"])
    gap = steps / (len(KILLED) + 1)
    return [(round(gap * (i + 1)) // every * every + every // 2, place) for i, place in enumerate(KILLED)]


# ------------------------------------------------------------------------------------------------------------------- a life


class Watcher:
    """Watches one life of the run from outside."""

    def __init__(self, run_dir: Path, records: Records, began: float, say: Callable[[str], None]) -> None:
        self.run_dir, self.records, self.began, self.say = run_dir, records, began, say
        self.seen: dict[tuple[int, float], str] = {}
        """Every process that the life had, by its number and start."""

    def now(self) -> float:
        return time.time() - self.began

    def live(
        self,
        life: Life,
        command: Sequence[str],
        environment: dict[str, str],
        kill: tuple[int, str] | None,
        patience: float,
    ) -> None:
        """Start the run, strike where a kill is planned, and wait for the end."""
        log = (self.run_dir.parent / f"life-{life.number}.log").open("wb")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.root = psutil.Process(process.pid)
        before, recorded = self._file(), 0.0
        while process.poll() is None:
            last = max(logged_steps(self.run_dir), default=0)
            life.last_step = last
            # A life replaces the file when it begins to log, and saves no checkpoint before.
            if life.first_step_at is None and self._file() != before:
                life.resumed_from = self._tracked()
                if last > life.resumed_from:
                    life.first_step_at = self.now()
                    seconds = life.first_step_at - life.started
                    self.say(
                        f"life {life.number}: goes on from step {life.resumed_from}, {seconds:.0f} s after its start"
                    )
            if self.now() - recorded >= INTERVAL:
                recorded = self.now()
                self._record_memory(life)
            if kill is not None and life.first_step_at is not None and not life.killed and last >= kill[0]:
                self._strike(life, kill[1])
            if life.killed_at is not None and self.now() - life.killed_at > patience and not life.ended_by:
                life.ended_by = "SIGTERM"
                self.say(f"life {life.number}: has not ended {patience:.0f} s after the kill; SIGTERM")
                os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.5)
        life.ended, life.status = self.now(), process.returncode
        life.ended_by = life.ended_by or "itself"
        log.close()
        life.message = _last_words(Path(log.name), self.run_dir)
        self._look_for_leftovers(life)

    def _file(self) -> int | None:
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def _tracked(self) -> int:
        path = self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0

    def _processes(self) -> list[psutil.Process]:
        try:
            processes = [self.root, *self.root.children(recursive=True)]
        except psutil.Error:
            return []
        for process in processes:
            try:
                self.seen[process.pid, process.create_time()] = title(process)[:120]
            except psutil.Error:
                continue
        return processes

    def _record_memory(self, life: Life) -> None:
        shares: dict[str, list[float]] = {}
        for process in self._processes():
            shares.setdefault(role_of(process), []).append(proportional_share(process.pid))
        seconds = round(self.now(), 1)
        for role, of_role in shares.items():
            self.records.memory.append(
                Memory(seconds, life.number, life.last_step, role, len(of_role), round(sum(of_role), 1))
            )

    def _strike(self, life: Life, place: str) -> None:
        role = "actor worker" if place == CHECKPOINT else place
        target = next((process for process in self._processes() if ROLES[role](process)), None)
        if target is None:
            return
        called = title(target)[:60]
        begun = self._wait_for_checkpoint() if place == CHECKPOINT else None
        target.kill()
        life.killed, life.killed_process, life.killed_at = place, called, self.now()
        if begun is not None:
            life.killed_process += f"; of {begun.name} missing: {', '.join(damage(begun, tuple(PARTS))) or 'nothing'}"
        life.last_step = max(logged_steps(self.run_dir))
        self.say(f"life {life.number}: killed {place} ({life.killed_process}) behind step {life.last_step}")

    def _wait_for_checkpoint(self) -> Path:
        """Until the next checkpoint is begun."""
        every = int(KNOBS["SAVE_FREQ"])
        folder = self.run_dir / "checkpoints" / f"global_step_{(max(logged_steps(self.run_dir)) // every + 1) * every}"
        while not (folder / "actor").exists() and self.root.is_running():
            time.sleep(0.0005)
        return folder

    def _look_for_leftovers(self, life: Life) -> None:
        deadline = time.monotonic() + LEFT
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.5)
        life.left_behind = "; ".join(sorted(name or "(no name)" for name in left.values()))
        for pid, created in left:
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()

    def _alive(self) -> dict[tuple[int, float], str]:
        alive = {}
        for (pid, created), name in self.seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    alive[pid, created] = name
            except psutil.Error:
                continue
        return alive


def _last_words(log: Path, run_dir: Path) -> str:
    """What the run said of its end: of the watchdog's words who died, when, and what now; or the last error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    words = [re.sub(r"\s{2,}", " ", line) for line in lines if re.match(r"(died|also died|when|what now)\s", line)]
    rest = [line for line in lines if re.search(r"was killed|Error: |already finished", line)]
    return "; ".join(words or rest[-1:]).replace(str(run_dir), "RUN")[:400]


def run(output_dir: Path, steps: int, patience: float, kills: int) -> None:
    """Start the run again and again until it is finished. A soak that was stopped itself goes on with the next life."""
    output_dir.mkdir(parents=True, exist_ok=True)
    run_dir = output_dir / "seed0" / "grail"
    description, records = _begun(output_dir, steps, patience, kills)
    began = description["began"]
    environment = {**os.environ, **KNOBS, "TOTAL_STEPS": str(steps), "OUTPUT_DIR": str(output_dir)}

    def say(line: str) -> None:
        text = f"{datetime.now(UTC):%H:%M:%S} {line}"
        print(text, flush=True)
        with (output_dir / "soak.log").open("a") as file:
            file.write(text + "\n")

    killed = {life.killed for life in records.lives}
    plan = [(step, place) for step, place in kill_plan(steps)[:kills] if place not in killed]
    # The model is made before, so that no life counts the time for it.
    say("model and problems")
    prepare = [sys.executable, "-m", "recipe.tiny.prepare", "--output-dir", str(output_dir / "seed0"), "--seed", "0"]
    subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    first = len(records.lives) + 1
    for number in range(first, first + 4 * len(plan) + 4):
        watcher = Watcher(run_dir, records, began, say)
        life = Life(number, round(watcher.now(), 1))
        records.lives.append(life)
        say(f"life {number}: started, next kill {plan[0] if plan else 'none'}")
        watcher.live(life, ["bash", SCRIPT], environment, plan[0] if plan else None, patience)
        say(
            f"life {number}: ended by {life.ended_by}, status {life.status}, step {life.last_step}; left behind: "
            f"{life.left_behind or 'nothing'}; {life.message}"
        )
        _save(output_dir, records)
        if life.killed:
            plan.pop(0)
        elif life.status == 0:
            say(f"finished after {watcher.now():.0f} s")
            return
    raise RuntimeError(f"the run did not finish in {number} lives; see {output_dir / 'soak.log'}")


def _begun(output_dir: Path, steps: int, patience: float, kills: int) -> tuple[dict[str, Any], Records]:
    """What is to be done, and what was recorded of it before."""
    path = output_dir / "plan.json"
    if path.exists():
        return json.loads(path.read_text()), _load(output_dir)
    description = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "began": time.time(),
        "steps": steps,
        "patience": patience,
        "knobs": KNOBS,
        "kills": kill_plan(steps)[:kills],
        "machine": f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.machine()}",
    }
    path.write_text(json.dumps(description, indent=2) + "\n")
    return description, Records()


def _load(output_dir: Path) -> Records:
    """What :func:`_save` wrote."""
    return Records(*(_read_as(output_dir / name, kind) for name, kind in (("lives.csv", Life), ("memory.csv", Memory))))


def _read_as(path: Path, kind: type) -> list[Any]:
    types = {entry.name: str(entry.type) for entry in fields(kind)}
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [{name: _value(text, types[name]) for name, text in row.items()} for row in csv.DictReader(file)]
    return [kind(**row) for row in rows]


def _value(text: str, kind: str) -> Any:
    if not text and "None" in kind:
        return None
    return {"int": int, "float": float, "str": str}[kind.split()[0]](text)


def _save(output_dir: Path, records: Records) -> None:
    _write_csv(
        output_dir / "lives.csv", [asdict(life) for life in records.lives], [entry.name for entry in fields(Life)]
    )
    rows = [asdict(memory) for memory in records.memory]
    _write_csv(output_dir / "memory.csv", rows, [entry.name for entry in fields(Memory)])


def _write_csv(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _rounded(row[name]) for name in columns} for row in rows)
    temporary.replace(path)


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------------------------------- the page


def collect(output_dir: Path) -> None:
    """Put the records of a soak where the page is drawn from."""
    PAGE.mkdir(parents=True, exist_ok=True)
    for name in ("memory.csv", "plan.json"):
        shutil.copy(output_dir / name, PAGE / name)
    run_dir = output_dir / "seed0" / "grail"
    lives = _load(output_dir).lives
    for life in lives:
        life.message = _last_words(run_dir.parent / f"life-{life.number}.log", run_dir)
    _write_csv(PAGE / "lives.csv", [asdict(life) for life in lives], [entry.name for entry in fields(Life)])
    rows = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        data = record["data"]
        accuracy = [value for name, value in data.items() if re.fullmatch(r"val-core/.+/acc/mean@\d+", name)]
        rows.append(
            {
                "step": record["step"],
                "reward": data.get("critic/score/mean"),
                "accuracy": accuracy[0] if accuracy else None,
                "entropy": data.get("actor/entropy"),
                "seconds": data.get("timing_s/step"),
                "save_seconds": data.get("timing_s/save_checkpoint"),
            }
        )
    _write_csv(PAGE / "steps.csv", rows, list(rows[0]))
    _write_csv(PAGE / "twice.csv", twice(run_dir / "tensorboard"), ["first", "last", "values", "differing", "names"])
    dumped = sorted(int(path.name[5:11]) for path in (run_dir / "tokens").glob("step_*.parquet"))
    plan = json.loads((PAGE / "plan.json").read_text())
    plan["dumped_steps"] = [dumped[0], dumped[-1], len(dumped)]
    (PAGE / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")


def twice(folder: Path) -> list[dict[str, Any]]:
    """Steps that two lives took, compared by what both logged of them: one row for each pair of lives.

    TensorBoard's files keep them, though no reader shows them twice. Times and memory are left out: they are each life's own.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    lives: list[dict[tuple[str, int], float]] = []
    for path in sorted(folder.glob("events.*")):
        logged = {
            (value.tag, event.step): float(tensor_util.make_ndarray(value.tensor))
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
            if not re.search(r"timing|perf/", value.tag)
        }
        lives += [logged] if logged else []
    rows = []
    for earlier, later in itertools.pairwise(lives):
        both = sorted(earlier.keys() & later.keys())
        differing = [key for key in both if earlier[key] != later[key]]
        if both:
            steps = [step for _, step in both]
            rows.append(
                {
                    "first": min(steps),
                    "last": max(steps),
                    "values": len(both),
                    "differing": len(differing),
                    "names": " ".join(sorted({name for name, _ in differing})),
                }
            )
    return rows


def _read(name: str) -> list[dict[str, Any]]:
    with (PAGE / name).open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _read_memory(name: str = "memory.csv") -> list[dict[str, Any]]:
    """The memory's records; what was recorded in one go has one time."""
    rows, roles, seconds = _read(name), set[str](), 0.0
    for row in rows:
        if row["role"] in roles or not roles:
            roles, seconds = set(), row["seconds"]
        roles.add(row["role"])
        row["seconds"] = seconds
    return rows


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text or None


@dataclass(frozen=True)
class Slope:
    """How the memory of a role moves with the steps, in MiB a hundred steps, over the lives."""

    role: str
    mebibytes: float
    """Median while the run trains."""
    a_hundred_steps: float
    error: float
    """Standard error."""


def slopes(memory: Sequence[dict[str, Any]], lives: Sequence[dict[str, Any]]) -> list[Slope]:
    """One line for each role: a common slope with a level for each life, by least squares; behind ``WARM_UP`` steps."""
    first = {life["number"]: life["resumed_from"] + WARM_UP for life in lives}
    begun = {life["number"]: life["first_step_at"] or math.inf for life in lives}
    # A run that has ended still makes its report.
    drivers = {row["life"]: row["seconds"] for row in memory if row["role"] == "driver"}
    ended = {
        life["number"]: min(life["killed_at"] or life["ended"], drivers.get(life["number"], math.inf)) - ENDING
        for life in lives
    }
    memory = [row for row in memory if row["seconds"] > begun.get(row["life"], 0)]
    memory = [row for row in memory if row["seconds"] < ended.get(row["life"], math.inf)]
    fitted = []
    totals: dict[tuple[float, float, float], float] = {}
    for row in memory:
        key = row["life"], row["step"], row["seconds"]
        totals[key] = totals.get(key, 0.0) + row["mebibytes"]
    all_rows = [*memory, *({"life": k[0], "step": k[1], "role": "all", "mebibytes": v} for k, v in totals.items())]
    for role in (*ROLES, REST, "all"):
        rows = [row for row in all_rows if row["role"] == role and row["step"] > first.get(row["life"], 0)]
        by_life: dict[float, list[dict[str, Any]]] = {}
        for row in rows:
            by_life.setdefault(row["life"], []).append(row)
        centred = [
            (
                row["step"] - statistics.fmean(r["step"] for r in of_life),
                row["mebibytes"] - statistics.fmean(r["mebibytes"] for r in of_life),
            )
            for of_life in by_life.values()
            if len(of_life) >= 3
            for row in of_life
        ]
        if len(centred) < 6:
            continue
        x, y = np.array(centred).T
        if not (x**2).sum():
            continue
        slope = float((x * y).sum() / (x**2).sum())
        freedom = max(1, len(x) - len(by_life) - 1)
        error = float(np.sqrt(((y - slope * x) ** 2).sum() / freedom / (x**2).sum()))
        fitted.append(Slope(role, statistics.median(row["mebibytes"] for row in rows), 100 * slope, 100 * error))
    return fitted


def problems(steps: Sequence[dict[str, Any]], total: int) -> list[str]:
    """What is wrong with the history; empty where every step stands there once and in order."""
    numbers = [int(row["step"]) for row in steps]
    expected = list(range(total + 1))
    if numbers == expected:
        return []
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    missing = sorted(set(expected) - set(numbers))
    return [f"steps twice: {twice}", f"steps missing: {missing}", f"in order: {numbers == sorted(numbers)}"]


def lost_seconds(life: dict[str, Any], following: dict[str, Any], seconds: float) -> float:
    """From the kill until the run was as far again: the end, the start, and the steps that were taken again."""
    again = life["last_step"] - following["resumed_from"]
    end, start = life["ended"] - life["killed_at"], following["first_step_at"] - following["started"]
    return end + start + max(0, again - 1) * seconds


def draw(steps: Sequence[dict[str, Any]], memory: Sequence[dict[str, Any]], lives: Sequence[dict[str, Any]]) -> None:
    """The curve, steps over time and memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, progress, amount) = pyplot.subplots(3, 1, figsize=(9, 11), dpi=120, layout="constrained")
    kills = [life for life in lives if life["killed"]]
    numbers = [row["step"] for row in steps if row["reward"] is not None]
    rewards = np.array([row["reward"] for row in steps if row["reward"] is not None])
    width = 20
    curve.plot(numbers, rewards, color="#c8d0d8", linewidth=0.8, label="training reward")
    if len(rewards) >= width:
        mean = np.convolve(rewards, np.ones(width) / width, mode="valid")
        curve.plot(numbers[width - 1 :], mean, color="#3b6ea5", label=f"mean of {width} steps")
    validated = [row for row in steps if row["accuracy"] is not None]
    curve.plot(
        [row["step"] for row in validated],
        [row["accuracy"] for row in validated],
        color="#0b6e4f",
        marker="o",
        label="held-out accuracy",
    )
    for i, life in enumerate(kills, start=1):
        curve.axvline(life["last_step"], color="#b5432a", linewidth=0.8, linestyle=":")
        curve.text(life["last_step"], 0.01, f" {i}", color="#b5432a", transform=curve.get_xaxis_transform())
    curve.set(
        xlabel="step", ylabel="share right", ylim=(0, 1), title="The run's one curve; dotted: kills", xlim=(0, None)
    )
    curve.legend(loc="upper left", ncols=3)

    for life in lives:
        start = life["started"] / 60
        progress.plot(
            [start, (life["first_step_at"] or life["ended"]) / 60],
            [life["resumed_from"]] * 2,
            color="#9aa5b1",
            linewidth=1,
        )
        if life["first_step_at"] is not None:
            stop = life["killed_at"] if life["killed_at"] is not None else life["ended"]
            progress.plot(
                [life["first_step_at"] / 60, stop / 60], [life["resumed_from"] + 1, life["last_step"]], color="#3b6ea5"
            )
        if life["killed_at"] is not None:
            progress.plot(life["killed_at"] / 60, life["last_step"], marker="x", color="#b5432a")
            name = f"{life['killed']} "
            at = (life["killed_at"] / 60, life["last_step"])
            progress.annotate(name, at, fontsize=8, ha="right", va="bottom", color="#b5432a")
    progress.set(xlabel="minutes", ylabel="step", title="Lives: grey starting, blue training, x killed")

    order = [name for name in (*ROLES, REST) if any(row["role"] == name for row in memory)]
    ends = [life["ended"] for life in lives]  # nothing is left then
    times = sorted({row["seconds"] for row in memory} | set(ends))
    place = {seconds: i for i, seconds in enumerate(times)}
    stack = np.zeros((len(order), len(times)))
    for row in memory:
        stack[order.index(row["role"]), place[row["seconds"]]] += row["mebibytes"] / 1024
    amount.stackplot([seconds / 60 for seconds in times], stack, labels=order, step="post", alpha=0.85)
    for life in kills:
        amount.axvline(life["killed_at"] / 60, color="#b5432a", linewidth=0.8, linestyle=":")
    amount.set(xlabel="minutes", ylabel="GiB (PSS)", title="Memory of all processes of the run")
    amount.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5, fontsize=8)
    for axes in (curve, progress, amount):
        axes.grid(alpha=0.3)
    figure.savefig(PAGE / "soak.png")
    pyplot.close(figure)


def _plain(message: str) -> str:
    """A line of a log without colours, the process that wrote it, and back quotes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(message))
    return re.sub(r"^\([^)]*pid=\d+[^)]*\)\s*", "", text).replace("`", "'").strip()


def write_page() -> None:
    """``docs/soak/README.md`` and its plot, from the records beside it."""
    draw(_read("steps.csv"), _read_memory(), _read("lives.csv"))
    (PAGE / "README.md").write_text(page_of_records())


def page_of_records() -> str:
    """The page from what ``docs/soak/`` holds."""
    plan = json.loads((PAGE / "plan.json").read_text())
    memory, lives = _read_memory(), _read("lives.csv")
    text = page(_read("steps.csv"), memory, lives, plan, _read("twice.csv"))
    later = slopes(_read_memory("later_memory.csv"), _read("later_lives.csv"))
    return text + growth(slopes(memory, lives), later, json.loads(ENGINE.read_text()))


def growth(first: Sequence[Slope], later: Sequence[Slope], engine: dict[str, Any]) -> str:
    """What grew, by the engine alone and by a later run in which it has bounds.

    Args:
        first: the slopes of the soak.
        later: those of the later run.
        engine: what ``benchmarks/bench_engine_memory.py`` recorded.
    """
    by_capacity = {measured["capacity"]: measured for measured in engine["capacities"]}
    (default, free), (bound, bounded) = by_capacity.items()
    of_first = {slope.role: slope for slope in first}
    lines = [
        "",
        "### What grows",
        "",
        "Two caches of others, which a CPU run now bounds by environment variables "
        "(`grail_advantage/verl_cpu/environment.py`; one that is set already is left alone):",
        "",
        f"- **vLLM's engine**: oneDNN keeps what it prepared for each shape of a product, {default} of them unless "
        f"`ONEDNN_PRIMITIVE_CACHE_CAPACITY` says otherwise, now {bound}. Shapes go by the number of tokens in the engine's "
        "batch, so new ones keep coming. No tensor and no Python object grows.",
        "- **Ray's control service** (`gcs_server`): it keeps the last 100,000 tasks for its dashboard, which is off here; "
        "`RAY_task_events_max_num_task_in_gcs`, now 1000.",
        "",
        f"The engine alone, generating and reloading its weights, `{engine['command']}`, {engine['date'][:10]}; anonymous "
        "memory in MiB:",
        "",
        "| step | " + " | ".join(f"{point['step']}" for point in free["points"]) + " | processor seconds |",
        "|---" * (len(free["points"]) + 2) + "|",
        *(
            f"| {capacity} shapes | " + " | ".join(f"{point['anonymous']:.0f}" for point in measured["points"])
            + f" | {measured['seconds']:.0f} |"
            for capacity, measured in ((default, free), (bound, bounded))
        ),
        "",
        "A later run with both bounds, `python benchmarks/soak.py run --steps 100 --kills 0`, MiB a hundred steps:",
        "",
        "| processes | this soak | with bounds | standard error |",
        "|---|---|---|---|",
        *(
            f"| {slope.role} | {of_first[slope.role].a_hundred_steps:+.1f} | {slope.a_hundred_steps:+.1f} | {slope.error:.1f} |"
            for slope in later
            if slope.role in of_first
        ),
        "",
        "What the engine still gains there is its cache, on the way to its bound.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def page(
    steps: Sequence[dict[str, Any]],
    memory: Sequence[dict[str, Any]],
    lives: Sequence[dict[str, Any]],
    plan: dict[str, Any],
    repeated: Sequence[dict[str, Any]],
) -> str:
    """The page's text."""
    seconds = statistics.median(row["seconds"] for row in steps if row["seconds"] is not None)
    saves = [row["save_seconds"] for row in steps if row["save_seconds"] is not None]
    wrong = problems(steps, plan["steps"])
    kills = [life for life in lives if life["killed"]]
    longest = max(lives, key=lambda life: life["last_step"] - life["resumed_from"])
    middle = (longest["last_step"] + longest["resumed_from"]) / 2
    half = [row for row in memory if row["life"] == longest["number"] and row["step"] > middle]
    late = {slope.role: slope.a_hundred_steps for slope in slopes(half, [longest])}
    first, last, count = plan["dumped_steps"]
    knobs = " ".join(f"{name}={value}" for name, value in plan["knobs"].items())
    lines = [
        "# A soak: killed again and again",
        "",
        f"`{knobs} TOTAL_STEPS={plan['steps']} bash {SCRIPT}`, {plan['date']}, {plan['machine']}, beside other work. At set "
        "steps one process was killed with SIGKILL; when the run had ended, the same command started it again. Generated by "
        "`python benchmarks/soak.py page` from [lives.csv](lives.csv), [steps.csv](steps.csv), [memory.csv](memory.csv), "
        "[twice.csv](twice.csv) and [plan.json](plan.json).",
        "",
        "![curve, lives and memory](soak.png)",
        "",
        "## The history",
        "",
        f"- {len(steps)} lines in `metrics.jsonl`, steps 0 to {plan['steps']}: "
        + ("every step once and in order." if not wrong else "; ".join(wrong)),
        f"- {count} files in the token dump, steps {first:.0f} to {last:.0f}.",
        f"- {len(lives)} lives, {len(kills)} kills, {lives[-1]['ended'] / 60:.0f} minutes; {seconds:.1f} s a step and "
        f"{statistics.median(saves):.2f} s a checkpoint (medians).",
        "",
        "## The lives",
        "",
        "| life | from step | to step | killed | ended by | status | s to the end | s to the next step | lost | left behind |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for life, following in zip(lives, [*lives[1:], None], strict=True):
        killed, lost, wait, back = life["killed"] or "", "", "", ""
        if life["killed_at"] is not None:
            wait = f"{life['ended'] - life['killed_at']:.0f}"
            if following is not None and following["first_step_at"] is not None:
                back = f"{following['first_step_at'] - following['started']:.0f}"
                again = int(life["last_step"] - following["resumed_from"])
                lost = f"{lost_seconds(life, following, seconds):.0f} s, {again} steps taken again"
        cells = [
            f"{life['number']:.0f}",
            f"{life['resumed_from']:.0f}",
            f"{life['last_step']:.0f}",
            killed,
            life["ended_by"],
            f"{life['status']:.0f}",
            wait,
            back,
            lost,
            life["left_behind"] or "nothing",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*To the end*: from the kill until the script had ended; *to the next step*: from the next start to the first "
        "step that it logged. *Lost* counts both and the steps that were taken again.",
        "",
        "What the run logged twice, of steps that were taken again, times and memory apart (TensorBoard's float32):",
        "",
        "| steps | values | differing |",
        "|---|---|---|",
        *(
            f"| {row['first']:.0f} to {row['last']:.0f} | {row['values']:.0f} | {row['differing']:.0f} |"
            if not row["names"]
            else f"| {row['first']:.0f} to {row['last']:.0f} | {row['values']:.0f} | {row['differing']:.0f}: {row['names']} |"
            for row in repeated
        ),
        "",
        "What the run said of its end:",
        "",
        *(f"- life {life['number']:.0f}: `{_plain(life['message'])}`" for life in lives if life["message"]),
        "",
        "## The memory",
        "",
        f"Proportional share (PSS), every {INTERVAL:.0f} s. The slope is that of a straight line with a level of its own for "
        f"each life, by least squares, behind the first {WARM_UP} steps of a life.",
        "",
        "| processes | MiB, median | MiB a hundred steps | standard error | "
        f"steps {middle:.0f} to {longest['last_step']:.0f} alone |",
        "|---|---|---|---|---|",
        *(
            f"| {slope.role} | {slope.mebibytes:.0f} | {slope.a_hundred_steps:+.1f} | {slope.error:.1f} | "
            f"{late.get(slope.role, math.nan):+.1f} |"
            for slope in slopes(memory, lives)
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="the soak")
    run_parser.add_argument("--output-dir", type=Path, required=True)
    run_parser.add_argument("--steps", type=int, default=300)
    run_parser.add_argument("--kills", type=int, default=len(KILLED), help=f"the first so many of: {', '.join(KILLED)}")
    run_parser.add_argument("--patience", type=float, default=180.0, help="seconds for a killed run to end by itself")
    page_parser = commands.add_parser("page", help="docs/soak/")
    page_parser.add_argument(
        "output_dir", type=Path, nargs="?", help="a finished soak; without it, what docs/soak/ holds"
    )
    later_parser = commands.add_parser("later", help="the memory of a later soak without kills, for the page")
    later_parser.add_argument("output_dir", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "later":
        for name in ("memory", "lives"):
            shutil.copy(arguments.output_dir / f"{name}.csv", PAGE / f"later_{name}.csv")
        write_page()
        return
    if arguments.command == "run":
        run(arguments.output_dir.resolve(), arguments.steps, arguments.patience, arguments.kills)
        return
    if arguments.output_dir is not None:
        collect(arguments.output_dir.resolve())
    write_page()


if __name__ == "__main__":
    main()
