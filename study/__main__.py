"""The study of token weights: work on its plan, and write its report.

    python -m study run --hours 2.5 --processes 2      the jobs that are missing, in their order, into docs/study2/*.csv
    python -m study run --regimes misconceptions       of one regime only
    python -m study run --study 3                      of the third study, into docs/study3/*.csv
    python -m study report                             docs/study2/REPORT.md from the CSV files
    python -m study screen --study 3 --seed 2001       alignment of all arms at one warmed-up model, some five minutes
    python -m study selections                         what hard selections pick, docs/study2/selections.csv, then the report
    python -m study real --data gsm8k_test.jsonl       ground truth and gradient test on a real model, docs/study2/real_model.md
    python -m study real --study 3 --data ...          gradient test of the third study's arms, docs/study3/real_model.md

A sitting ends when its hours are over, the plan's core-hours are spent, or nothing is left. Finished jobs are in the CSV
files at once, and the next sitting resumes from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from grail_advantage.view.whole_file import write_whole
from recipe.marked_text import write_marked
from study.plan import MEASUREMENTS, RUNS, StudyPlan
from study.plan3 import THIRD
from study.real_model import load, measure
from study.report import write_report
from study.report3 import write_third
from study.screen import screen
from study.selections import write as write_selections
from study.task import REGIMES
from study.work import Files, Sitting

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "study2"


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
    selections = commands.add_parser("selections", help="what hard selections pick, at models that are made again")
    selections.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a warm-up of some five minutes each")
    screening = commands.add_parser("screen", help="alignment of all arms at one model, before any training")
    screening.add_argument("--seed", type=int, default=2001, help="of the warm-up, which is made where it is gone")
    screening.add_argument("--regime", choices=REGIMES, default="misconceptions")
    for command in (run, selections, screening):
        models = ROOT / "outputs" / "study2"
        command.add_argument("--models", type=Path, default=models, help="warmed-up models; may be deleted")
    report = commands.add_parser("report", help="write the report of what is there")
    real = commands.add_parser("real", help="gradient test, and for the second study ground truth, on a real model")
    for command in (run, screening, report, real):
        command.add_argument("--study", type=int, default=2, choices=(2, 3), help="which study")
    for command in (run, selections, report):
        command.add_argument("--data-dir", type=Path, help="folder of the CSV files and the report")
    real.add_argument("--data", type=Path, required=True, help="GSM8K's test set, JSON lines")
    real.add_argument(
        "--model", default="smollm2", help="folder or name of a model; smollm2 is that of its PyPI package"
    )
    real.add_argument("--problems", type=int, default=8)
    real.add_argument(
        "--longest", type=int, default=192, help="tokens of prompt and response; longer problems are left out"
    )
    real.add_argument("--blocks", type=int, default=5, help="last blocks whose parameters the gradients are of")
    real.add_argument("--out", type=Path, help="page whose marked part is written; the gains go beside it as .csv")
    options = parser.parse_args(arguments)

    if options.command == "real":
        model, tokenizer = load(options.model)
        size = {"count": options.problems, "longest": options.longest, "blocks": options.blocks}
        page = options.out or ROOT / "docs" / f"study{options.study}" / "real_model.md"
        for tables, gains in measure(model, tokenizer, options.data, study=options.study, **size):
            write_marked(page, "real model", tables)
            write_whole(page.with_suffix(".csv"), gains)
        return
    third = getattr(options, "study", 2) == 3
    plan = plan or (THIRD if third else StudyPlan())
    if options.command != "report":
        options.models.mkdir(parents=True, exist_ok=True)
    if options.command == "screen":
        print(*screen(plan, options.models, options.regime, options.seed), sep="\n")
        return
    folder = options.data_dir or ROOT / "docs" / ("study3" if third else "study2")
    files = Files(folder)
    if options.command == "run":
        sitting = Sitting(plan, files, options.models, regimes=options.regimes, kinds=options.kinds)
        sitting.run(seconds=3600 * options.hours, processes=options.processes)
    elif options.command == "selections":
        sitting = Sitting(plan, files, options.models, regimes=REGIMES, kinds=[])
        write_selections(plan, sitting, options.seeds)
    print(*(write_third if third else write_report)(plan, files, folder), sep="\n")


if __name__ == "__main__":
    main()
