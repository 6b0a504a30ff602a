"""Run the study, or what of it is not there yet, and write its report.

    python -m study --output-dir outputs/study                 everything
    python -m study --output-dir DIR --arms grpo grail_official --seeds 0
    python -m study --output-dir DIR --report-only

A finished run is one file, ``DIR/raw/ARM-seedK.json``; one whose settings are unchanged is not run again. The report goes to
``DIR/report``.
"""

from __future__ import annotations

import argparse
import os
import platform
from datetime import date
from pathlib import Path

from study.arms import ARMS
from study.ground_truth import TRUTH_FILE, ground_truth
from study.report import write_report
from study.runs import RAW, WARM_UP, StudySettings, prepare_model, run_all

REPORT = "report"


def main(arguments: list[str] | None = None) -> None:
    names = [arm.name for arm in ARMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study"))
    parser.add_argument("--arms", nargs="+", choices=names, default=names, metavar="ARM", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(max(arm.seeds for arm in ARMS))))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time, each on one thread")
    parser.add_argument("--report-only", action="store_true", help="write the report from the runs that are there")
    parser.add_argument("--command", default="python -m study", help="what the report gives as its command")
    options = parser.parse_args(arguments)

    settings = StudySettings()
    output_dir = options.output_dir
    arms = [arm for arm in ARMS if arm.name in options.arms]
    if not options.report_only:
        prepare_model(output_dir / WARM_UP, settings)
        run_all(output_dir, arms, options.seeds, settings, options.processes)
        ground_truth(output_dir, settings)
    header = {
        "command": f"`{options.command}`",
        "hardware": f"{_processor()}, {os.cpu_count()} cores, no GPU; each run on one thread",
        "date": date.today().isoformat(),
    }
    measured = output_dir / TRUTH_FILE
    files = write_report(
        output_dir / RAW,
        output_dir / REPORT,
        header,
        truth_path=measured if measured.is_file() else None,
        expected=[(arm.name, seed) for arm in arms for seed in options.seeds if seed < arm.seeds],
    )
    print("\n".join(str(path) for path in files))


def _processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
