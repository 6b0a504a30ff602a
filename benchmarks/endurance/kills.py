"""What becomes of a real run when one of its processes is killed.

Each run is that of the tests (a model of 15,000 parameters, a checkpoint after every step), by the recipe's entry point. After
its second step one process gets one signal. "Of the run" is every process below the driver then, and all that came later.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipe.marked_text import table, write_marked
from tests.run_life.killed_run import TITLES, KilledRun, send

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "kills.json"
PAGE, MARKER = ROOT / "docs" / "dev" / "kills.md", "kills"
BOUND = 180.0
"""Seconds that a run gets to be gone."""
KINDS = {name: (name, "SIGKILL") for name in TITLES} | {
    f"{process} {name}": (process, name)
    for process, names in {"driver": ("SIGTERM", "SIGINT", "SIGKILL"), "script": ("SIGTERM", "SIGKILL")}.items()
    for name in names
}
"""Process and signal of every row of the table."""
SCRIPT = f'source {ROOT}/scripts/launch.sh; launch "$@"'
"""What examples/ and scripts/ do around the driver."""


def observe(process: str, name: str, folder: Path) -> dict[str, Any]:
    """Start a run, kill, and record how it ends."""
    run = KilledRun(folder, wrapper=["bash", "-c", SCRIPT, "script"] if process == "script" else [])
    try:
        run.await_step(2)
        victim = run.driver if process == "driver" else run.owner if process == "script" else run.find(process)
        send(victim, name)
        driver_after, all_after = run.end(BOUND)
    finally:
        run.kill_all()
    lines = [line.strip() for line in (run.result.stdout + run.result.stderr).replace(f"{ROOT}/", "").splitlines()]
    begins = ("grail_advantage", "died ", "cause ", "waited ", "what now ")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "driver_gone": round(driver_after, 1),
        "all_gone": round(all_after, 1),
        "status": run.result.returncode,
        "processes": len(run.everybody),
        "said": [line for line in lines if line.startswith(begins)],
        "last": lines[-3:],
    }


def page() -> str:
    """The text between the page's marks, from the record."""
    record = json.loads(RECORD.read_text())
    rows = []
    for kind, (process, name) in KINDS.items():
        if (row := record["kinds"].get(kind)) is None:
            continue
        said = sorted(row["said"], key=lambda line: not line.startswith("died "))
        message = next((line for line in said if line.startswith(("died ", "grail_advantage"))), "nothing of its own")
        seconds = [f"{row[gone]:.0f} s" for gone in ("driver_gone", "all_gone")]
        rows.append([process, name, *seconds, row["status"], " ".join(message.removeprefix("died ").split())])
    dates = sorted({row["date"][:10] for row in record["kinds"].values()})
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    count = max(row["processes"] for row in record["kinds"].values())
    lines = table(["killed", "by", "driver gone after", "all gone after", "status", "said"], rows)
    lines[1] = "|---|---|--:|--:|--:|---|"
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    heading = f"`python -m benchmarks.endurance kill`, {when}; {versions}; runs of up to {count} processes."
    return "\n".join([heading, "", *lines])


def write_page() -> None:
    """The page from what is recorded."""
    write_marked(PAGE, MARKER, page())


def run(kinds: list[str]) -> None:
    """Observe these kinds, one after the other; the other rows of the record stay."""
    # What a shell starts in the background has Ctrl-C ignored, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kinds": {}}
    record["versions"] = {name: version(name) for name in ("verl", "ray", "vllm")}
    for kind in kinds:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                record["kinds"][kind] = observe(*KINDS[kind], Path(folder))
            except (AssertionError, LookupError) as error:
                print(f"{kind}: {error}", file=sys.stderr, flush=True)
                continue
        print(f"{kind}: {json.dumps(record['kinds'][kind], indent=1)}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_page()
