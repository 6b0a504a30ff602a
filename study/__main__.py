"""The study of token weights: work on its plan, write its report, or that of the first study.

    python -m study run --hours 2.5 --processes 2      the jobs that are missing, in their order, into docs/study2/*.csv
    python -m study run --regimes misconceptions       of one regime only
    python -m study report                             docs/study2/REPORT.md from the CSV files
    python -m study first [--measure]                  docs/study/REPORT.md; with --measure also its result_tokens.csv

A sitting ends when its hours are over or nothing is left. What is finished stands in the CSV files at once, and the next
sitting goes on from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from study.first_report import measure_again, write_first_report
from study.plan import MEASUREMENTS, RUNS, StudyPlan
from study.report import write_report
from study.task import REGIMES
from study.work import Files, Sitting

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "study2"
FIRST = ROOT / "docs" / "study"


def main(arguments: list[str] | None = None, plan: StudyPlan | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do what is missing")
    run.add_argument("--hours", type=float, default=2.5, help="wall-clock time of this sitting")
    run.add_argument("--processes", type=int, default=2, choices=(1, 2), help="jobs at a time, each on one thread")
    run.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    run.add_argument("--kinds", nargs="+", choices=(*RUNS, *MEASUREMENTS), default=[*RUNS, *MEASUREMENTS])
    run.add_argument(
        "--models", type=Path, default=ROOT / "outputs" / "study2", help="warmed-up models; may be deleted"
    )
    report = commands.add_parser("report", help="write the report of what is there")
    for command in (run, report):
        command.add_argument("--data-dir", type=Path, default=DATA, help="folder of the CSV files and the report")
    first = commands.add_parser("first", help="write the first study's report")
    first.add_argument("--data-dir", type=Path, default=FIRST)
    first.add_argument("--measure", action="store_true", help="make its warmed-up model again and judge its responses")
    options = parser.parse_args(arguments)

    plan = plan or StudyPlan()
    if options.command == "first":
        if options.measure:
            print(measure_again(options.data_dir))
        print(*write_first_report(options.data_dir), sep="\n")
        return
    files = Files(options.data_dir)
    if options.command == "run":
        options.models.mkdir(parents=True, exist_ok=True)
        sitting = Sitting(plan, files, options.models, regimes=options.regimes, kinds=options.kinds)
        sitting.run(seconds=3600 * options.hours, processes=options.processes)
    print(*write_report(plan, files, options.data_dir), sep="\n")


if __name__ == "__main__":
    main()
