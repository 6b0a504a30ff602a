"""What becomes of a real run when one of its processes is killed: the table of docs/endings.md.

    python benchmarks/kill_matrix.py                          every kind, one run after the other
    python benchmarks/kill_matrix.py --kinds engine raylet    only these; the others' rows stay as they are
    python benchmarks/kill_matrix.py --write                  the page from what is recorded

Each run is that of the tests (a model of 15,000 parameters, two responses to two prompts, a checkpoint after every step), by
the recipe's entry point. After its second step one process gets one signal. Recorded are: seconds until the driver is gone and
until the last process of the run is, the driver's exit status, and which lines told the user. "Of the run" is every process
below the driver when the signal was sent, and every one that came below these later.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # tests/ is not installed

from recipe.marked_text import write_marked  # noqa: E402
from tests.run_life.killed_run import TITLES, KilledRun, send  # noqa: E402

RECORD = Path(__file__).parent / "results" / "kills.json"
PAGE, MARKER = ROOT / "docs" / "endings.md", "kills"
BOUND = 180.0
"""Seconds that a run gets to be gone."""


class Kind(NamedTuple):
    """One row of the table."""

    process: str
    """One of ``TITLES``, or ``driver``, or ``script``."""
    signal: str

    def __str__(self) -> str:
        return f"{self.process} {self.signal}" if self.process in ("driver", "script") else self.process


KINDS = {
    str(kind): kind
    for kind in (
        *(Kind(process, "SIGKILL") for process in TITLES),
        *(Kind("driver", signal) for signal in ("SIGTERM", "SIGINT", "SIGKILL")),
        *(Kind("script", signal) for signal in ("SIGTERM", "SIGKILL")),
    )
}
SCRIPT = f'source {ROOT}/scripts/launch.sh; launch "$@"'
"""What examples/ and scripts/ do around the driver."""


def observe(kind: Kind, folder: Path) -> dict[str, Any]:
    """Start a run, kill, and see what becomes of it."""
    wrapper = ["bash", "-c", SCRIPT, "script"] if kind.process == "script" else []
    run = KilledRun(folder, wrapper=wrapper)
    try:
        run.await_step(2)
        victim = {"driver": lambda: run.driver, "script": lambda: run.owner}.get(
            kind.process, lambda: run.find(kind.process)
        )()
        send(victim, kind.signal)
        driver_after, all_after = run.end(BOUND)
    finally:
        run.kill_all()
    # Where the project lies is of no interest.
    output = (run.result.stdout + run.result.stderr).replace(f"{ROOT}/", "")
    lines = [line.strip() for line in output.splitlines()]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "driver_gone": round(driver_after, 1),
        "all_gone": round(all_after, 1),
        "status": run.result.returncode,
        "processes": len(run.everybody),
        "said": [
            line for line in lines if line.startswith(("grail_advantage", "died ", "cause ", "waited ", "what now "))
        ],
        "last": lines[-3:],
    }


def table(record: dict[str, Any]) -> str:
    """The page's table, in Markdown."""
    lines = ["| killed | by | driver gone after | all gone after | status | said |", "|---|---|--:|--:|--:|---|"]
    for name, kind in KINDS.items():
        row = record["kinds"].get(name)
        if row is not None:
            message = next((line for line in row["said"] if line.startswith("died ")), None)
            message = message or next(
                (line for line in row["said"] if line.startswith("grail_advantage")), "nothing of its own"
            )
            cell = " ".join(message.removeprefix("died ").split())
            lines.append(
                f"| {kind.process} | {kind.signal} | {row['driver_gone']:.0f} s | {row['all_gone']:.0f} s | "
                f"{row['status']} | {cell} |"
            )
    return "\n".join(lines)


def page(record: dict[str, Any]) -> str:
    """What stands between the page's marks."""
    dates = sorted(row["date"][:10] for row in record["kinds"].values())
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    count = max(row["processes"] for row in record["kinds"].values())
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"`python benchmarks/kill_matrix.py`, {when}; {versions}; runs of up to {count} processes.\n\n{table(record)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--write", action="store_true", help="only write the page")
    args = parser.parse_args()
    # What a shell starts in the background has Ctrl-C ignored, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kinds": {}}
    if not args.write:
        record["versions"] = {name: version(name) for name in ("verl", "ray", "vllm")}
        for name in args.kinds:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    record["kinds"][name] = observe(KINDS[name], Path(folder))
                except (AssertionError, LookupError) as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    continue
            print(f"{name}: {json.dumps(record['kinds'][name], indent=1)}", flush=True)
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_marked(PAGE, MARKER, page(record))


if __name__ == "__main__":
    main()
